"""Proofs that ranks can never go on, on plain values and on simulated programs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.client.faults.deadlock import prove
from nbdist.client.faults.rank_state import Inactive, RankState, Wait

WORLD4 = frozenset(range(4))


def waiting(
    seq: int = 1,
    kind: str = "all_reduce",
    group: str = "0",
    counts: dict[str, int] | None = None,
    **wait: Any,
) -> RankState:
    """Return a rank that has launched and now waits."""
    return RankState(
        "waiting", Wait(kind, group, seq, **wait), {group: seq, **(counts or {})}, {}, {}
    )


def computing(**counts: int) -> RankState:
    return RankState("computing", None, {"0": 0, **counts}, {}, {})


def idle(world: int = 0) -> RankState:
    return RankState("idle", None, {"0": world}, {}, {})


def stuck(said: dict[int, RankState], gone: dict[int, Inactive] | None = None) -> tuple[int, ...]:
    found = prove(said, said, gone or {}, frozenset(said) | frozenset(gone or {}))
    return found.ranks if found else ()


def text(said: dict[int, RankState], gone: dict[int, Inactive] | None = None) -> str:
    found = prove(said, said, gone or {}, frozenset(said) | frozenset(gone or {}))
    assert found is not None
    return found.text


def test_ranks_that_wait_for_one_that_has_finished_are_stuck_and_the_text_names_both() -> None:
    wait = waiting(12, group="dp", bytes=8_400_000, line=14, ranks=(0, 1, 2, 3))
    said = {0: wait, 1: idle(11), 2: wait, 3: wait}
    gone = {1: Inactive("finished")}
    assert stuck(said, gone) == (0, 2, 3)
    assert text(said, gone) == (
        "rank 1 has finished the cell; "
        "ranks 0, 2-3 wait for it in all_reduce #12 (8.4 MB, group dp), line 14."
    )


def test_a_rank_that_serves_may_have_finished_the_cell_and_answers_all_the_same() -> None:
    receives = RankState("waiting", Wait("recv", "7", 2, peer=0, ranks=(0, 1)), {}, {}, {})
    gone = {0: Inactive("finished")}
    assert stuck({0: idle(), 1: receives}, gone) == (1,)
    assert stuck({0: replace(idle(), serves=True), 1: receives}, gone) == ()


def test_a_rank_that_is_not_in_the_cell_is_named_with_the_ranks_that_are() -> None:
    said = {0: waiting(), 1: idle()}
    found = prove(said, said, {1: Inactive("absent", "-r 0")}, frozenset({0, 1}))
    assert found is not None
    assert found.text == (
        "rank 1 is not in this cell (-r 0); rank 0 waits for it in all_reduce #1 (group 0)."
    )
    assert "run the cell on all ranks" in found.do.text


def test_two_groups_in_crossed_order_are_a_deadlock_that_names_both_sides() -> None:
    said = {
        0: waiting(3, group="0", line=4, counts={"1": 1}, ranks=(0, 1)),
        1: waiting(2, "all_gather", "1", line=9, counts={"0": 2}, ranks=(0, 1)),
    }
    assert text(said) == (
        "rank 0 waits for rank 1 in all_reduce #3 (group 0), line 4; "
        "rank 1 waits for rank 0 in all_gather #2 (group 1), line 9: neither can go on."
    )


def test_two_collectives_in_the_same_place_of_a_groups_order_are_a_deadlock() -> None:
    said = {0: waiting(3, "all_reduce"), 1: waiting(3, "all_gather")}
    assert stuck(said) == (0, 1)


def test_a_rank_that_computes_is_waited_for() -> None:
    assert stuck({0: waiting(), 1: computing()}) == ()


def test_nobody_is_stuck_who_waits_only_for_one_that_computes() -> None:
    # Rank 2 waits for 1, which waits for 0, which computes.
    said = {
        0: computing(**{"1": 0}),
        1: waiting(1, group="1", counts={"2": 0}, ranks=(0, 1)),
        2: waiting(1, group="2", ranks=(1, 2)),
    }
    assert stuck(said) == ()


def test_who_waits_for_a_stuck_rank_is_stuck_too() -> None:
    said = {
        0: idle(0),
        1: waiting(1, counts={"2": 0}, ranks=(0, 1)),
        2: waiting(1, group="2", ranks=(1, 2)),
    }
    gone = {0: Inactive("finished")}
    assert stuck(said, gone) == (1, 2)
    assert text(said, gone).endswith("rank 2 waits for rank 1 in all_reduce #1 (group 2).")


def test_ranks_that_have_all_launched_only_wait_for_the_bytes() -> None:
    assert stuck({0: waiting(), 1: waiting()}) == ()
    assert stuck({0: waiting(), 1: idle(1)}, {1: Inactive("finished")}) == ()


def test_nothing_is_concluded_about_a_rank_that_has_not_answered() -> None:
    assert stuck({0: waiting(ranks=(0, 1))}, {1: Inactive("finished")}) == ()


def test_a_dead_rank_has_launched_all_it_ever_will() -> None:
    assert stuck({0: waiting(ranks=(0, 1))}, {1: Inactive("dead", "killed by SIGKILL")}) == (0,)


def test_an_engine_that_tells_no_counts_proves_nothing() -> None:
    said = {0: replace(waiting(), counts=None), 1: RankState("idle")}
    assert stuck(said, {1: Inactive("finished")}) == ()


@pytest.mark.parametrize(
    "later",
    [waiting(2), waiting(1, counts={"1": 5}), computing(), waiting(1, "broadcast")],
    ids=["the next collective", "launches elsewhere", "computing", "another kind"],
)
def test_a_wait_that_changes_between_two_looks_proves_nothing(later: RankState) -> None:
    gone = {1: Inactive("finished")}
    before = {0: waiting(), 1: idle()}
    assert prove(before, {0: later, 1: idle()}, gone, frozenset({0, 1})) is None


def test_who_has_come_to_wait_between_two_looks_is_named_too() -> None:
    gone = {1: Inactive("finished")}
    before = {0: waiting(), 1: idle(), 2: computing()}
    found = prove(before, {**before, 2: waiting()}, gone, frozenset({0, 1, 2}))
    assert found is not None
    assert found.ranks == (0, 2)
    assert "ranks 0, 2 wait for it" in found.text


def test_within_backward_only_a_peer_that_never_comes_proves_anything() -> None:
    maybe = waiting(1, is_certain=False)
    assert stuck({0: maybe, 1: idle()}, {1: Inactive("finished")}) == (0,)
    crossed = {0: maybe, 1: waiting(1, group="1", ranks=(0, 1), counts={"0": 0})}
    assert stuck(crossed) == ()


def test_a_receiver_waits_for_its_sender_and_a_sender_for_its_receiver() -> None:
    gone = {1: Inactive("finished")}
    receives = RankState("waiting", Wait("recv", "0", 2, peer=1), {}, {}, {})
    assert stuck({0: receives, 1: RankState("idle", None, {}, {"0/0": 1}, {})}, gone) == (0,)
    assert stuck({0: receives, 1: RankState("idle", None, {}, {"0/0": 2}, {})}, gone) == ()
    sends = RankState("waiting", Wait("send", "0", 2, peer=1), {}, {}, {})
    assert stuck({0: sends, 1: RankState("idle", None, {}, {}, {"0/0": 1})}, gone) == (0,)
    assert stuck({0: sends, 1: RankState("idle", None, {}, {}, {"0/0": 2})}, gone) == ()


def test_two_ranks_that_both_receive_from_each_other_are_stuck_and_a_pair_is_not() -> None:
    receives = [RankState("waiting", Wait("recv", "0", 1, peer=1 - r), {}, {}, {}) for r in (0, 1)]
    assert stuck(dict(enumerate(receives))) == (0, 1)
    sends = RankState("waiting", Wait("send", "0", 1, peer=0), {}, {}, {})
    assert stuck({0: receives[0], 1: sends}) == ()


def test_who_receives_from_anyone_is_stuck_when_nobody_is_left() -> None:
    anyone = RankState("waiting", Wait("recv", "0", 1, ranks=(0, 1, 2)), {}, {}, {})
    left = {0: anyone, 1: idle(), 2: computing()}
    assert stuck(left, {1: Inactive("finished")}) == ()
    assert stuck(left, {1: Inactive("finished"), 2: Inactive("finished")}) == (0,)


def test_who_makes_a_group_waits_for_every_rank_of_it() -> None:
    store = RankState("waiting", Wait("store", ""), {}, {}, {})
    gone = {1: Inactive("finished")}
    assert stuck({0: store, 1: idle(), 2: store}, gone) == ()  # rank 2 may be about to go on
    assert stuck({0: store, 1: idle()}, gone) == (0,)
    long = RankState("waiting", Wait("store", "", seconds=9), {}, {}, {})
    assert stuck({0: long, 1: idle(), 2: long}, gone) == (0, 2)
    assert stuck({0: store, 1: idle(), 2: computing()}, gone) == ()


def test_a_broadcast_under_way_is_given_time_before_a_circle_through_it_counts() -> None:
    def said(seconds: float) -> dict[int, RankState]:
        return {
            # Rank 0 gets its data from rank 2, which has sent it and computes.
            0: waiting(1, "broadcast", seconds=seconds, counts={"1": 0}, ranks=(0, 1, 2)),
            1: waiting(1, group="1", ranks=(0, 1)),
            2: computing(**{"0": 1}),
        }

    assert stuck(said(1.0)) == ()
    assert stuck(said(20.0)) == (0, 1)


# -- properties, on programs of collectives that are run a step at a time

Program = Sequence[tuple[str, frozenset[int]]]  # (group, members)


def run(
    programs: Sequence[Program], choices: Sequence[int]
) -> tuple[dict[int, RankState], set[int]]:
    """Run each rank's program as the choices say; return what the ranks say, and who is done.

    A choice names a rank, which launches its next collective; one that waits is left waiting.
    """
    n = len(programs)
    at = [0] * n  # collectives that are over
    launched: list[dict[str, int]] = [{} for _ in range(n)]
    waits = [False] * n
    for choice in choices:
        rank = choice % n
        if not waits[rank] and at[rank] < len(programs[rank]):
            group, _ = programs[rank][at[rank]]
            launched[rank][group] = launched[rank].get(group, 0) + 1
            waits[rank] = True
        for r in range(n):
            if waits[r]:
                group, members = programs[r][at[r]]
                if all(launched[p].get(group, 0) >= launched[r][group] for p in members):
                    waits[r] = False
                    at[r] += 1
    said, done = {}, set()
    for r in range(n):
        wait = None
        if waits[r]:
            group, members = programs[r][at[r]]
            wait = Wait("all_reduce", group, launched[r][group], ranks=tuple(sorted(members)))
        elif at[r] == len(programs[r]):
            done.add(r)
        said[r] = RankState("", wait, dict(launched[r]), {}, {})
    return said, done


GROUPS = [("0", WORLD4)] + [
    ("".join(map(str, pair)), frozenset(pair)) for pair in combinations(range(4), 2)
]
orders = st.lists(st.sampled_from(GROUPS), max_size=8)
schedules = st.lists(st.integers(0, 3), max_size=60)


def shares(order: Program) -> list[list[tuple[str, frozenset[int]]]]:
    """Return each rank's part of one order for all: such programs never deadlock."""
    return [[(g, members) for g, members in order if r in members] for r in range(4)]


@given(orders, schedules)
def test_a_program_that_can_go_on_is_never_called_stuck(
    order: Program, schedule: list[int]
) -> None:
    said, done = run(shares(order), schedule)
    assert stuck(said, {rank: Inactive("finished") for rank in done}) == ()


@given(st.lists(orders, min_size=4, max_size=4))
def test_of_programs_that_have_come_to_a_halt_exactly_the_unfinished_are_stuck(
    programs: list[Program],
) -> None:
    parts = [[c for c in program if r in c[1]] for r, program in enumerate(programs)]
    said, done = run(parts, list(range(4)) * 40)
    gone = {rank: Inactive("finished") for rank in done}
    assert set(stuck(said, gone)) == set(range(4)) - done


@given(st.lists(orders, min_size=4, max_size=4), schedules)
def test_the_stuck_stay_so_whatever_the_others_do_next(
    programs: list[Program], schedule: list[int]
) -> None:
    parts = [[c for c in program if r in c[1]] for r, program in enumerate(programs)]
    said, done = run(parts, schedule)
    now = stuck(said, {rank: Inactive("finished") for rank in done})
    later, done = run(parts, [*schedule, *list(range(4)) * 40])
    assert set(now) <= set(stuck(later, {rank: Inactive("finished") for rank in done}))
    assert all(later[rank].wait == said[rank].wait for rank in now)


@given(st.lists(orders, min_size=4, max_size=4), schedules)
def test_every_stuck_rank_blames_one_that_is_gone_or_stuck(
    programs: list[Program], schedule: list[int]
) -> None:
    parts = [[c for c in program if r in c[1]] for r, program in enumerate(programs)]
    said, done = run(parts, schedule)
    found = prove(said, said, {rank: Inactive("finished") for rank in done}, WORLD4)
    if found is not None:
        for peers in found.waits_for.values():
            assert peers
            assert peers <= done | set(found.ranks)
        assert all(f"rank {r}" in found.text or "ranks" in found.text for r in found.ranks)


def message(kind: str, peer: int | None, tag: int = 0, number: int = 1, **tagged: int) -> RankState:
    """Return a rank that waits in a message; `tagged` as it counts, "_" for "/" and no group."""
    wait = Wait(kind, "0", number, peer=peer, ranks=(0, 1, 2), tag=tag, tag_number=number)
    counted = {"0/" + key.replace("_", "/"): n for key, n in tagged.items()}
    return RankState("waiting", wait, {"0": 0}, {}, {}, tagged=counted)


def finished(**tagged: int) -> RankState:
    counted = {"0/" + key.replace("_", "/"): n for key, n in tagged.items()}
    return RankState("idle", None, {"0": 0}, {}, {}, tagged=counted)


def test_a_send_and_a_receive_with_other_tags_are_a_deadlock_that_names_both() -> None:
    said = {0: message("send", 1, 1, send_1_1=1), 1: message("recv", 0, 2, recv_0_2=1)}
    assert text(said) == (
        "rank 0 waits for rank 1 in send #1 (tag 1, group 0); "
        "rank 1 waits for rank 0 in recv #1 (tag 2, group 0): neither can go on."
    )
    found = prove(said, said, {}, frozenset({0, 1}))
    assert found is not None
    assert "match each recv with a send of the same tag" in found.do.text


def test_a_message_whose_tag_may_still_come_is_waited_for() -> None:
    receives = message("recv", 0, 2, recv_0_2=1)
    busy = RankState("computing", None, {"0": 0}, {}, {}, tagged={"0/send/1/1": 1})
    assert stuck({0: busy, 1: receives}) == ()
    sent = finished(send_1_1=1, send_1_2=1)
    assert stuck({0: sent, 1: receives}, {0: Inactive("finished")}) == (), "on its way"
    only_another = finished(send_1_1=1)
    assert stuck({0: only_another, 1: receives}, {0: Inactive("finished")}) == (1,)


def test_a_receive_from_any_source_is_stuck_when_nobody_can_send_any_more() -> None:
    receives = message("recv", None, 5, recv_any_5=1)
    gone = {1: Inactive("finished"), 2: Inactive("finished")}
    assert stuck({0: receives, 1: finished(), 2: finished()}, gone) == (0,)
    assert stuck({0: receives, 1: finished(), 2: finished(send_0_4=1)}, gone) == (0,)
    assert stuck({0: receives, 1: finished(), 2: finished(send_0_5=1)}, gone) == (), "on its way"


def test_a_receive_from_any_source_may_get_what_a_silent_rank_has_sent() -> None:
    receives = message("recv", None, 5, recv_any_5=1)
    said = {0: receives, 1: finished()}
    assert prove(said, said, {1: Inactive("finished")}, frozenset(range(3))) is None
    found = prove(said, said, {1: Inactive("finished"), 2: Inactive("died")}, frozenset(range(3)))
    assert found is not None


def test_a_large_message_that_a_receive_from_any_source_takes_is_no_deadlock() -> None:
    said = {
        0: message("recv", None, recv_any_0=1),
        1: message("send", 0, send_0_0=1),
        2: finished(),
    }
    assert stuck(said, {2: Inactive("finished")}) == ()
