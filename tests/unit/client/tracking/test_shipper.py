"""Waiting for runs to be sent: what passes by itself is waited for, a dead server is not."""

import threading
from pathlib import Path

import pytest

from nbdist.client.tracking.folder import make_private_folder
from nbdist.client.tracking.shipping.shipper import wait_until_sent
from nbdist.client.tracking.spool import (
    CONTINUED_UNSENT,
    PREPARING,
    STUDY_UNSENT,
    Begin,
    SpooledRun,
    SpoolState,
    SpoolWriter,
)

BEGIN = Begin(
    key="00000000000000000001-1-3", uri="sqlite:///x", experiment="nb", name="a", time_ms=5
)


@pytest.fixture
def ended(tmp_path: Path) -> SpooledRun:
    writer = SpoolWriter(make_private_folder(tmp_path / ".nbdist") / "spool", BEGIN, {})
    writer.end("FINISHED", 9)
    writer.close()
    return SpooledRun(tmp_path / ".nbdist" / "spool" / BEGIN.key)


@pytest.mark.parametrize("why", [PREPARING, CONTINUED_UNSENT, STUDY_UNSENT])
def test_a_reason_that_passes_by_itself_does_not_end_the_wait(ended: SpooledRun, why: str) -> None:
    ended.save(SpoolState(error=why))
    sent = threading.Timer(0.1, lambda: ended.save(SpoolState(is_done=True)))
    sent.start()
    try:
        assert wait_until_sent(ended.folder.parent.parent, 30.0)
    finally:
        sent.join()


def test_a_server_that_does_not_answer_ends_the_wait(ended: SpooledRun) -> None:
    ended.save(SpoolState(error="ConnectionError: no route to host"))
    assert not wait_until_sent(ended.folder.parent.parent, 3600.0)
