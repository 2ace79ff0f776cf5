"""What decides whether a group must be re-created."""

import pytest

from nbdist.client.faults.fault_handler import agree
from nbdist.shared.wire import CellEnd


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, True),
        ({0: {}, 1: {}}, True),
        ({0: {"world": 3}, 1: {"world": 3}}, True),
        ({0: {"world": 3}, 1: {"world": 4}}, False),
        ({0: {"world": 3, "left": 1}, 1: {"world": 3}}, True),
        ({0: {"world": 3, "left": 1}, 1: {"world": 3, "left": 2}}, False),
        ({0: {"world": 3}}, True),
    ],
)
def test_ranks_agree_when_they_launched_equally_many_in_each_group_they_share(
    counts: dict[int, dict[str, int]], expected: bool
) -> None:
    assert agree({rank: CellEnd(collectives=said) for rank, said in counts.items()}) is expected


@pytest.mark.parametrize(
    ("sent", "received", "expected"),
    [
        ({0: {"0/1": 2}, 1: {}}, {0: {}, 1: {"0/0": 2}}, True),
        ({0: {"0/1": 2}, 1: {}}, {0: {}, 1: {"0/0": 1}}, False),
        ({0: {"0/1": 2}, 1: {}}, {0: {}, 1: {}}, False),
        ({0: {}, 1: {}}, {0: {}, 1: {"0/0": 1}}, False),
        ({0: {"0/1": 1}, 1: {"0/0": 1}}, {0: {"0/1": 1}, 1: {"0/0": 1}}, True),
        ({0: {"0/1": 1}, 1: {}}, {0: {}, 1: {"0/any": 1}}, True),
        ({0: {"0/2": 1}, 1: {}}, {0: {}, 1: {}}, True),
        ({0: {"0/11": 1}, 1: {}}, {0: {}, 1: {}}, True),
    ],
)
def test_ranks_agree_when_each_message_between_them_was_received(
    sent: dict[int, dict[str, int]], received: dict[int, dict[str, int]], expected: bool
) -> None:
    said = {rank: CellEnd(sent=sent[rank], received=received[rank]) for rank in sent}
    assert agree(said) is expected
