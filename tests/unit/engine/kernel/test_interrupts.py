"""An interrupt strikes the message it names, and nothing that runs before or after it."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.engine.kernel import cleanup, interrupts
from nbdist.engine.steps import defer_interrupt


@pytest.fixture(autouse=True)
def on_a_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The main thread takes interrupts as a rank's does, and afterwards as before."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(interrupts.here, "_wanted", None)
    interrupts.here.end()
    yield
    interrupts.here.end()
    signal.signal(signal.SIGINT, before)


def test_a_message_that_runs_is_interrupted() -> None:
    interrupts.here.begin("this")
    with pytest.raises(KeyboardInterrupt):
        interrupts.here.order("this")


def test_a_message_that_was_to_stop_before_it_began_stops_at_once() -> None:
    assert not interrupts.here.order("this")
    with pytest.raises(KeyboardInterrupt):
        interrupts.here.begin("this")


def test_what_comes_when_a_message_is_over_strikes_none_that_follows() -> None:
    interrupts.here.begin("this")
    interrupts.here.end()
    assert not interrupts.here.order("this")
    interrupts.here.begin("next")
    assert not interrupts.here.order("this")
    assert interrupts.here.running == "next"


def test_one_that_the_program_has_blocked_ends_with_its_message() -> None:
    interrupts.here.begin("this")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    assert interrupts.here.order("this")
    interrupts.here.end()
    interrupts.here.begin("next")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    assert interrupts.here.running == "next"


def test_a_signal_that_names_nothing_is_dropped_between_messages() -> None:
    interrupts.here.begin("this")
    interrupts.here.end()
    signal.raise_signal(signal.SIGINT)
    interrupts.here.begin("next")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_message_does_not_end_while_it_is_being_interrupted() -> None:
    interrupts.here.begin("this")
    seen: list[str | None] = []
    is_held = threading.Event()

    def hold() -> None:
        with interrupts.here.while_it_runs("this"):
            is_held.set()
            ending.wait()
            seen.append(interrupts.here.running)

    ending = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    lock, interrupts.here._lock = interrupts.here._lock, _Announced(interrupts.here._lock, ending)  # type: ignore[assignment]
    interrupts.here.end()
    interrupts.here._lock = lock
    holder.join()

    assert seen == ["this"]
    assert interrupts.here.running is None


def test_an_interrupt_that_waits_for_a_step_strikes_no_message_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    struck: list[tuple[str | None, bool]] = []
    next_began, has_struck = threading.Event(), threading.Event()
    strike = interrupts.here.strike

    def strike_late(message: str | None) -> bool:
        next_began.wait()
        struck.append((message, strike(message)))
        has_struck.set()
        return struck[-1][1]

    monkeypatch.setattr(interrupts.here, "strike", strike_late)
    interrupts.here.begin("this")
    defer_interrupt.here.begin()
    signal.raise_signal(signal.SIGINT)
    defer_interrupt.here.end()
    interrupts.here.end()
    interrupts.here.begin("next")
    next_began.set()
    has_struck.wait()

    assert struck == [("this", False)]


def test_only_commands_of_the_message_that_is_named_are_interrupted() -> None:
    with subprocess.Popen(["sleep", "600"]) as command:
        interrupts.here.begin("next")
        assert cleanup.interrupt_children("this") == 0
        assert command.poll() is None
        assert cleanup.interrupt_children("next") == 1
    assert command.returncode == -signal.SIGINT


class _Announced:
    """A lock that tells that somebody is about to take it."""

    def __init__(self, lock: threading.Lock, event: threading.Event) -> None:
        self._lock, self._event = lock, event

    def __enter__(self) -> None:
        self._event.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize(
    ("module", "error", "is_told"),
    [
        ("multiprocessing.resource_sharer", ConnectionResetError, False),
        ("multiprocessing.resource_sharer", EOFError, False),
        ("multiprocessing.resource_sharer", KeyError, True),
        ("train", ConnectionResetError, True),
    ],
)
def test_a_worker_says_nothing_of_a_loop_that_no_longer_reads(
    module: str, error: type[Exception], is_told: bool
) -> None:
    told: list[type[BaseException]] = []
    hook = interrupts.without_hung_up_readers(lambda kind, *_: told.append(kind))
    served: dict[str, Any] = {"__name__": module, "error": error}
    exec("def serve(): raise error", served)
    with pytest.raises(error) as caught:
        served["serve"]()
    trace = caught.tb.tb_next  # it begins where it was caught
    hook(caught.type, caught.value, trace)
    assert told == [error] * is_told


def test_an_interrupt_of_a_step_strikes_when_the_step_is_whole() -> None:
    held = defer_interrupt.HeldInterrupts()

    def end_step() -> None:
        held.end()
        threading.Event().wait(60)

    interrupts.here.begin("this")
    held.begin(longest_s=60)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        end_step()
