"""What decides whether a group must be formed anew."""

import pytest

from nbdist.client.rescue import agree


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
    assert agree(counts) is expected
