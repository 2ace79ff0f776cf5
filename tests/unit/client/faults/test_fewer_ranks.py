"""With how many ranks a cell goes on when some cannot be replaced."""

import pytest

from nbdist.client.faults.fewer_ranks import most_ranks


@pytest.mark.parametrize(
    ("left", "fitting", "room", "most"),
    [
        ([0, 1, 2], [1, 2, 3], 3, 3),
        ([0, 1, 2], [1, 2], 3, 2),  # the layout takes an even number
        ([0, 2, 3], [1, 2, 3], 3, 3),  # rank 1 needs a process
        ([0, 1, 2], [], 3, 0),
        ([1], [1], 1, 0),  # rank 1 would go, and with it all that anyone holds
        ([2, 3], [1, 2], 2, 0),
        ([0, 1, 4], [1, 2, 3, 4], 4, 4),  # there is a slot for one that died
    ],
)
def test_as_many_go_on_as_fit_with_one_at_least_that_holds_something(
    left: list[int], fitting: list[int], room: int, most: int
) -> None:
    assert most_ranks(left, fitting, room) == most
