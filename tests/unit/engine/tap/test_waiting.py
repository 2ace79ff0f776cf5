"""What the main thread is said to wait in, where the tap sees no end: in C++, and on a GPU."""

import threading
from typing import Any

import pytest

from nbdist.engine.tap import in_flight
from nbdist.engine.tap.collective import LaunchedCollective


class _Book:
    name, title, ranks = "0", "the default group", (0, 1)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> in_flight.TapState:
    made = in_flight.TapState()
    monkeypatch.setattr(in_flight, "state", made)
    return made


def launch(state: in_flight.TapState, seq: int) -> LaunchedCollective:
    """Launch what nobody looks for the end of, as on CUDA."""
    book: Any = _Book()
    state.last = LaunchedCollective("all_reduce", book, seq, 8, seq, None, None)
    return state.last


def test_the_newest_launch_within_backward_may_be_waited_for(state: in_flight.TapState) -> None:
    launch(state, 1)
    in_flight.backward_began()
    assert in_flight.waiting() is None
    launch(state, 2)
    waiting = in_flight.waiting()
    assert waiting is not None
    assert (waiting.seq, waiting.is_certain) == (2, False)


def test_what_its_operator_has_waited_for_is_over(state: in_flight.TapState) -> None:
    in_flight.backward_began()
    launch(state, 1).is_waited_for = True
    assert in_flight.waiting() is None


def test_nothing_is_waited_for_after_backward(state: in_flight.TapState) -> None:
    in_flight.backward_began()
    launch(state, 1)
    in_flight.backward_ended(is_measured=False)
    assert in_flight.waiting() is None


def test_of_two_threads_that_wait_the_first_is_told(state: in_flight.TapState) -> None:
    first, second = launch(state, 1), launch(state, 2)
    me = threading.get_ident()
    state.blocked = {me: (second, 20), me + 1: (first, 10)}
    waiting = in_flight.waiting()
    assert waiting is not None
    assert (waiting.seq, waiting.is_certain) == (1, True)
