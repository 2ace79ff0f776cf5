"""Asking ranks what they do, with futures in place of ranks."""

import threading
import time
from concurrent.futures import Future
from typing import Any

from nbdist.client.faults.poll import Poll
from nbdist.client.faults.rank_state import Inactive

WORLD = frozenset({0, 1})
FINISHED = {1: Inactive("finished")}


def answer(counts: int, *, waits: bool) -> dict[str, Any]:
    wait = {"kind": "barrier", "group": "0", "seq": counts, "line": None}
    return {"waiting": wait if waits else None, "counts": {"0": counts}}


class Ranks:
    """Remembers who was asked, and answers when told to."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.open: dict[int, Future[Any]] = {}

    def ask(self, rank: int) -> "Future[Any]":
        self.asked.append(rank)
        self.open[rank] = Future()
        return self.open[rank]

    def say(self, **counts: int) -> None:
        """Answer for rank 0, which waits, and rank 1, which does not."""
        self.open[0].set_result(answer(counts.get("of_0", 1), waits=True))
        self.open[1].set_result(answer(counts.get("of_1", 0), waits=False))


def test_two_rounds_that_are_alike_and_apart_prove_a_deadlock_and_one_does_not() -> None:
    ranks = Ranks()
    watch = Poll(ranks.ask)
    watch.attend([0, 1], FINISHED, 0.3, 100.0)
    ranks.say()
    assert watch.attend([0, 1], FINISHED, 0.3, 100.1)
    assert watch.deadlock(WORLD) is None
    watch.attend([0, 1], FINISHED, 0.3, 100.2)
    assert ranks.asked == [0, 1], "it is not time yet"
    watch.attend([0, 1], FINISHED, 0.3, 100.5)
    ranks.say()
    watch.attend([0, 1], FINISHED, 0.3, 100.6)
    found = watch.deadlock(WORLD)
    assert found is not None
    assert found.ranks == (0,)


def test_rounds_that_follow_too_soon_or_with_a_rank_newly_gone_prove_nothing() -> None:
    for gone_before, pause in ((FINISHED, 0.1), ({}, 0.4)):
        ranks = Ranks()
        watch = Poll(ranks.ask)
        watch.attend([0, 1], gone_before, 0.1, 100.0)
        ranks.say()
        watch.attend([0, 1], gone_before, 0.1, 100.0)
        watch.attend([0, 1], FINISHED, 0.1, 100.0 + pause)
        ranks.say()
        assert watch.attend([0, 1], FINISHED, 0.1, 100.01 + pause)
        assert watch.deadlock(WORLD) is None


def test_a_rank_that_does_not_answer_is_left_out_and_not_asked_again() -> None:
    ranks = Ranks()
    watch = Poll(ranks.ask)
    watch.attend([0, 1], {}, 0.3, 100.0)
    ranks.open[0].set_result(answer(1, waits=True))
    assert not watch.attend([0, 1], {}, 0.3, 100.5)
    assert watch.attend([0, 1], {}, 0.3, 101.1)
    assert watch.silent(101.1) == [1]
    assert set(watch.last.said) == {0}
    watch.attend([0, 1], {}, 0.3, 101.5)
    assert ranks.asked == [0, 1, 0]


def test_a_rank_that_has_died_is_left_out_of_the_answers() -> None:
    ranks = Ranks()
    watch = Poll(ranks.ask)
    watch.attend([0, 1], {}, 0.3, 100.0)
    ranks.open[0].set_result(answer(1, waits=True))
    ranks.open[1].set_exception(RuntimeError("rank 1 ended"))
    assert watch.attend([0, 1], {}, 0.3, 100.1)
    assert set(watch.last.said) == {0}
    assert watch.silent(200.0) == []


def test_answers_that_change_tell_that_something_moves() -> None:
    ranks = Ranks()
    watch = Poll(ranks.ask)
    moved = []
    for at, count in ((1000.0, 1), (2000.0, 1), (3000.0, 2)):
        watch.attend([0, 1], {}, 0.3, at)
        ranks.say(of_0=count)
        watch.attend([0, 1], {}, 0.3, at + 1)
        moved.append(watch.moved_at)
    assert moved[0] == moved[1]
    assert moved[2] == 3001.0


def test_a_rank_that_says_it_waits_is_known_before_the_others_have_answered() -> None:
    ranks = Ranks()
    watch = Poll(ranks.ask)
    watch.attend([0, 1], {}, 0.1, 100.0)
    ranks.open[0].set_result(answer(1, waits=True))
    assert not watch.attend([0, 1], {}, 0.1, 100.1), "rank 1 owes its answer"

    assert watch.waiting_since(99.0) == {0}
    assert watch.waiting_since(100.5) == set(), "asked before"


def test_who_was_asked_a_moment_ago_is_waited_for_and_asked_again() -> None:
    ranks = Ranks()
    watch = Poll(ranks.ask)
    watch.attend([0, 1], {}, 0.3, 100.0)

    def answer_both_rounds() -> None:
        ranks.say(of_1=1)
        while ranks.asked != [0, 1, 0, 1]:
            time.sleep(0.001)
        ranks.say(of_1=2)

    answering = threading.Timer(0.05, answer_both_rounds)
    answering.start()
    watch.ask_now([0, 1], {}, timeout_s=30.0)
    answering.join()
    assert sorted(watch.last.said) == [0, 1]
    assert watch.last.said[1].counts == {"0": 2}
