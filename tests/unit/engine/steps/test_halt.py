"""Ranks meet after one step, do there what is asked, and go on: each rank with a main thread."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from nbdist.client.cells.halts import Held, late
from nbdist.engine.component import EndedCell
from nbdist.engine.steps.halt import Halt
from nbdist.shared.wire import CellStart

ENDED = EndedCell(1, "", has_succeeded=True)


class Rank:
    """One rank's halt, with steps that the test lets it make."""

    def __init__(self, **more: Any) -> None:
        self.steps = 0
        self.did: list[int] = []  # after which steps it acted
        self.halt = Halt(**more)
        self.halt.step = lambda: self.steps
        self.halt.actions = {"note": self._note, "fail": self._fail}
        self.halt.cell_began(CellStart(number=1, ranks=(0, 1), prompt=1, params={"alpha": 1}))
        self._main = ThreadPoolExecutor(1)

    def _note(self, text: str) -> dict[str, Any]:
        self.did.append(self.steps)
        return {"text": text}

    def _fail(self) -> dict[str, Any]:
        raise KeyError("b")

    def train(self, steps: int) -> None:
        """Make steps on its main thread."""
        for _ in range(steps):
            self.steps += 1
            if self.halt.is_asked:
                self.halt.stand()

    def trains(self, steps: int) -> Any:
        """Begin to; what is returned ends with them."""
        return self._main.submit(self.train, steps)

    def until(self, key: str, name: str, value: object) -> dict[str, Any]:
        """Look at it until what it tells has this value."""
        while (looked := self.halt.look(key))[name] != value:
            pass
        return looked


def test_nobody_stands_still_unasked() -> None:
    rank = Rank()
    rank.train(5)
    assert not rank.halt.is_asked
    assert rank.halt.look("a")["is_on"] is False


def test_ranks_at_different_steps_all_act_after_the_one_that_is_next_for_the_first() -> None:
    ranks = [Rank(), Rank(), Rank()]
    for rank, steps in zip(ranks, (2, 7, 5), strict=True):
        rank.train(steps)
    held = Held.of({r: rank.halt.hold("a") for r, rank in enumerate(ranks)})
    assert held == Held({0: 2, 1: 7, 2: 5}, ("alpha",), None)
    assert held.target == 8
    trained = [rank.trains(10) for rank in ranks]  # each stands after its next step
    for rank in ranks:
        rank.halt.go_on_to("a", held.target)
    for rank in ranks:
        rank.until("a", "stands", 8)
    assert late(8, {r: rank.halt.look("a") for r, rank in enumerate(ranks)}) == []
    for rank in ranks:
        rank.halt.act("a", "note", text="here")
    assert [rank.until("a", "answer", {"text": "here"})["is_on"] for rank in ranks] == [True] * 3
    for rank in ranks:
        assert rank.halt.end("a") == 8
    for one in trained:
        one.result(10)
    assert [rank.did for rank in ranks] == [[8]] * 3
    assert [rank.steps for rank in ranks] == [12, 17, 15]


def test_a_rank_whose_cell_ends_before_the_step_lets_none_act() -> None:
    ends, goes_on = Rank(), Rank()
    goes_on.train(3)
    for rank in (ends, goes_on):
        rank.halt.hold("a")
        rank.halt.go_on_to("a", 4)
    trained = goes_on.trains(1)
    goes_on.until("a", "stands", 4)
    ends.train(2)
    ends.halt.cell_ended(ENDED)
    assert late(4, {0: ends.halt.look("a"), 1: goes_on.halt.look("a")}) is None
    goes_on.halt.end("a")
    trained.result(10)
    assert goes_on.did == ends.did == []


def test_an_error_of_what_is_asked_is_its_answer() -> None:
    rank = Rank()
    rank.halt.hold("a")
    rank.halt.go_on_to("a", 1)
    trained = rank.trains(1)
    rank.until("a", "stands", 1)
    rank.halt.act("a", "fail")
    rank.until("a", "answer", {"error": "KeyError: 'b'"})
    rank.halt.end("a")
    trained.result(10)


@contextmanager
def paused(rank: Rank) -> Iterator[Any]:
    rank.halt.hold("a")
    rank.halt.go_on_to("a", 1)
    trained = rank.trains(3)
    rank.until("a", "stands", 1)
    rank.halt.end("a", pause=True)
    yield trained
    trained.result(10)


def test_who_is_paused_stays_where_it_is_for_the_next_question_and_until_it_goes_on() -> None:
    rank = Rank()
    with paused(rank):
        rank.halt._longest_s = 0.0  # a notebook that has paused it is waited for
        assert rank.halt.is_paused
        held = Held.of({0: rank.halt.hold("b")})
        assert (held.paused, held.target) == (1, 1)
        assert rank.halt.look("a")["is_on"] is False  # who asked before is heard no more
        rank.halt.act("b", "note", text="here")
        rank.until("b", "answer", {"text": "here"})
        rank.halt.end("b", pause=True)
        assert rank.halt.is_paused
        assert rank.halt.end() == 1
    assert (rank.steps, rank.did) == (3, [1])


def test_who_was_told_to_go_on_stands_no_more_though_it_has_not_woken_up_yet() -> None:
    rank = Rank()
    wakes = threading.Event()

    def sleep() -> dict[str, Any]:
        return {"woke": wakes.wait(10)}

    rank.halt.actions = {"sleep": sleep}
    with paused(rank):
        rank.halt.hold("b")
        rank.halt.act("b", "sleep")
        assert rank.halt.end() == 1
        assert rank.halt.end() is None
        assert rank.halt.hold("c")["paused"] is False
        rank.halt.go_on_to("c", 2)
        assert rank.halt.look("c")["stands"] is None
        wakes.set()
        rank.until("c", "stands", 2)
        assert rank.halt.end("c") == 2


def test_a_notebook_that_says_nothing_is_not_waited_for_and_the_cell_tells_of_it() -> None:
    rank = Rank(longest_s=0.0)
    rank.halt.hold("a")
    rank.train(1)
    assert rank.halt.look("a")["is_on"] is False
    (said,) = rank.halt.cell_ended(ENDED)
    assert said == (
        "The notebook had asked this rank to stand still after step 1, and then said nothing for "
        "0 s: it went on."
    )


def test_an_interrupt_that_ends_a_pause_leaves_nothing_asked() -> None:
    rank = Rank()

    def interrupted() -> dict[str, Any]:
        raise KeyboardInterrupt

    rank.halt.actions = {"interrupted": interrupted}
    rank.halt.hold("a")
    rank.halt.go_on_to("a", 1)
    trained = rank.trains(1)
    rank.until("a", "stands", 1)
    rank.halt.act("a", "interrupted")
    assert isinstance(trained.exception(10), KeyboardInterrupt)
    assert not rank.halt.is_asked
    assert not rank.halt.is_paused


def test_another_optimizer_s_part_of_a_step_that_is_over_is_not_held() -> None:
    rank = Rank()
    rank.train(1)
    rank.halt.hold("a")
    rank.halt.stand()  # returns: it would wait for a step to be named
    assert rank.halt.look("a")["is_on"] is True


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({}, "No cell runs on the ranks"),
        ({0: {"params": None, "step": None, "paused": False}}, "No cell runs on the ranks"),
        ({0: {"params": [], "step": None, "paused": False}}, "Steps are not counted"),
        (
            {r: {"params": [], "step": 3, "paused": r == 0} for r in (0, 1)},
            "Some of the ranks alone were paused",
        ),
    ],
)
def test_where_ranks_cannot_meet_the_error_says_why(said: dict[int, Any], error: str) -> None:
    with pytest.raises(Exception, match=error):
        Held.of(said)


def test_a_step_without_a_request_takes_no_lock() -> None:
    rank = Rank()
    rank.halt._changed = threading.Condition()
    with rank.halt._changed:
        rank.trains(3).result(10)
    assert rank.steps == 3
