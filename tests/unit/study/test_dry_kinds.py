"""Ranks that were not run do what those of their kind do, in their own groups, or are unknown."""

from typing import Any

from nbdist.study.dry import Branch, Call, Trace
from nbdist.study.dry_kinds import of_kind, told_apart

WORLD = tuple(range(8))


def world(line: int = 1, **more: Any) -> Call:
    return Call("all_reduce", f"line {line}", WORLD, "0", 4, "float32", "SUM", **more)


def row(rank: int) -> Call:
    """Return a call on the second axis of a mesh of 2 x 4, whose groups are named 5 and 6."""
    start = rank // 4 * 4
    return Call("all_gather", "line 2", tuple(range(start, start + 4)), str(5 + rank // 4))


def column(rank: int, name: str = "") -> Call:
    own = name or str(1 + rank % 4)
    return Call("broadcast", "line 3", (rank % 4, rank % 4 + 4), own, peer=rank % 4)


def test_ranks_between_call_the_groups_of_their_own_axes() -> None:
    run = {rank: Trace((world(), row(rank), column(rank))) for rank in (0, 3, 4, 7)}
    found = of_kind(run, WORLD, 8)
    assert found is not None
    assert found[6].calls == (world(), row(6), column(6))


def test_groups_that_do_not_follow_from_one_are_not_told() -> None:
    odd = {rank: Trace((column(rank, "9"),)) for rank in (0, 7)}
    assert of_kind(odd, WORLD, 8) is None
    alone = Call("all_reduce", "line 1", (0, 1, 3), "1")
    assert of_kind({0: Trace((alone,)), 3: Trace((alone,))}, WORLD, 8) is None


def test_ranks_that_differ_or_ask_who_they_are_stand_for_none() -> None:
    assert of_kind({0: Trace((world(),)), 7: Trace((world(2),))}, WORLD, 8) is None
    assert of_kind({0: Trace(brought=(b"1",)), 7: Trace(brought=(b"2",))}, WORLD, 8) is None
    assert of_kind({0: Trace(), 7: Trace(asks_rank=True)}, WORLD, 8) is None
    assert of_kind({0: Trace(end="waits"), 7: Trace()}, WORLD, 8) is None


def test_numbers_are_equal_on_all_ranks_or_on_none_of_a_kind() -> None:
    def found(*values: int) -> dict[int, Trace] | None:
        ranks = (0, 4, 7)
        made = {
            rank: Trace(branches=(Branch("line 1", value, False),), peak=rank)
            for rank, value in zip(ranks, values, strict=True)
        }
        return of_kind(made, WORLD, 8)

    same, own = found(3, 3, 3), found(3, 4, 5)
    assert same is not None
    assert own is not None
    assert {one.branches[0].value for one in same.values()} == {3}
    assert len({one.branches[0].value for one in own.values()}) == 8
    assert own[2].peak == 7
    assert found(3, 3, 4) is None


def test_peers_and_the_ends_of_axes_may_be_told_apart() -> None:
    assert told_apart({1: Trace((row(1), column(1)))}, 8) == {0, 1, 3, 4, 7}
    assert told_apart({0: Trace((world(peer=5),))}, 8) == {0, 5}
