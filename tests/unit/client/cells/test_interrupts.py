"""Interrupts that come while a cell runs are counted, and raise again afterwards."""

import os
import signal
import threading
from typing import cast

import pytest

from nbdist.client.cells.cell_context import CellContext
from nbdist.client.cells.interrupts import Interrupts, hold_interrupts
from nbdist.client.session.session import Session
from tests.unit.fakes import FakeCluster


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    signal.sigpending()  # a call into the interpreter, where the handler runs


def test_interrupts_are_counted_and_not_raised() -> None:
    with Interrupts() as interrupts:
        _interrupt()
        _interrupt()

    assert interrupts.count == 2


def test_an_interrupt_after_it_is_an_interrupt_as_before() -> None:
    with Interrupts():
        pass

    with pytest.raises(KeyboardInterrupt):
        _interrupt()


def test_a_request_reaches_what_it_was_made_for_and_nothing_that_begins_later() -> None:
    with Interrupts() as first:
        assert first.ask()
        assert first.ask(1)

    with Interrupts() as next_one:
        assert not first.ask()
        assert not first.ask(0)

    assert (first.count, first.ranks) == (1, {1})
    assert (next_one.count, next_one.ranks) == (0, set())


def test_on_another_thread_the_main_threads_handler_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter() -> None:
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    assert seen == [before]


def test_a_stop_that_is_interrupted_is_finished_first() -> None:
    class Interrupted(FakeCluster):
        def stop(self) -> list[str]:
            _interrupt()
            return super().stop()

    cluster = Interrupted()
    session = Session(cluster, cast(CellContext, None), "2 ranks")

    with pytest.raises(KeyboardInterrupt, match="All ranks have ended"):
        session.stop()

    assert cluster.has_stopped
    session.stop()  # nothing is left to do


def _interrupt_twice(done: list[str]) -> None:
    with hold_interrupts():
        _interrupt()
        _interrupt()
        done.append("all of it")


def test_an_interrupt_that_is_held_comes_when_the_block_has_ended() -> None:
    done: list[str] = []

    with pytest.raises(KeyboardInterrupt):
        _interrupt_twice(done)

    assert done == ["all of it"]


def test_where_no_interrupt_came_nothing_is_raised_and_the_next_one_comes_at_once() -> None:
    with hold_interrupts():
        pass

    with pytest.raises(KeyboardInterrupt):
        _interrupt()


def _interrupt_and_fail() -> None:
    with hold_interrupts():
        _interrupt()
        raise ZeroDivisionError


def test_a_block_that_fails_while_an_interrupt_is_held_raises_its_error_alone() -> None:
    with pytest.raises(ZeroDivisionError):
        _interrupt_and_fail()
