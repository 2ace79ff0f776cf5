import pytest

from nbdist.engine.averaging.groups import parts_of
from nbdist.engine.averaging.rounds import Rounds
from nbdist.shared.errors import LayoutError


def test_a_warm_up_averages_after_each_step_and_rounds_begin_after_it() -> None:
    rounds = Rounds(every=3, warmup_steps=2)

    assert [step for step in range(1, 12) if rounds.due(step) == "all"] == [1, 2, 5, 8, 11]


def test_averages_over_all_take_the_place_of_those_inside() -> None:
    rounds = Rounds(every=2, between=6)

    due = {step: rounds.due(step) for step in range(1, 13)}
    assert [step for step, what in due.items() if what == "inside"] == [2, 4, 8, 10]
    assert [step for step, what in due.items() if what == "all"] == [6, 12]


@pytest.mark.parametrize("rounds", [Rounds(3, 2), Rounds(2, between=6), Rounds(1), Rounds(5, 9)])
def test_the_next_meeting_is_the_first_averaging_over_all_that_is_far_enough(
    rounds: Rounds,
) -> None:
    for step in range(20):
        for ahead in (1, 2, 7):
            found = next(k for k in range(ahead, 99) if rounds.due(step + k) == "all")
            assert rounds.next_for_all(step, ahead) == found


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"every": 0}, "1 or more, not 0"),
        ({"every": 2.5}, "not 2.5"),
        ({"every": 4, "between": 10}, "use between=8"),
        ({"every": 4, "warmup_steps": -1}, "not -1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers: dict[str, int], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Rounds(**numbers)


def test_groups_are_hosts_or_so_many_neighbours() -> None:
    assert parts_of(["a", "b", "a", "b"], None) == [(0, 2), (1, 3)]
    assert parts_of(["a"] * 4, 2) == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("hosts", "size", "said"),
    [
        (["a"] * 4, None, "nothing between hosts"),
        (["a", "a", "b"], None, "a: 2, b: 1"),
        (["a"] * 6, 4, "use one of 1, 2, 3"),
        (["a"] * 4, 4, "use one of 1, 2"),
    ],
)
def test_groups_that_cannot_be_are_refused(hosts: list[str], size: int | None, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        parts_of(hosts, size)
