"""What a rank's kernel says of a message beside its answer."""

from typing import Any

import pytest

from nbdist.engine.kernel.ipython.kernel import _is_read
from nbdist.shared import wire

OUR_CELL = {"header": {"msg_type": "execute_request"}, "metadata": {wire.CELL_KEY: {}}}
OUR_REQUEST = {"header": {"msg_type": wire.REQUEST}, "metadata": {}}
OTHERS_CELL = {"header": {"msg_type": "execute_request"}, "metadata": {}}


@pytest.mark.parametrize(
    ("parent", "is_silent", "read"),
    [
        (OUR_CELL, False, {"idle"}),  # its output is complete then
        (OUR_CELL, True, set()),
        (OUR_REQUEST, False, set()),
        (OTHERS_CELL, True, {"busy", "idle"}),  # of another client of ipyparallel's
        ({}, False, {"busy", "idle"}),
    ],
)
def test_only_what_somebody_reads_of_a_status_is_sent(
    parent: dict[str, Any], is_silent: bool, read: set[str]
) -> None:
    statuses = ("busy", "idle")
    assert {status for status in statuses if _is_read(status, parent, is_silent=is_silent)} == read
