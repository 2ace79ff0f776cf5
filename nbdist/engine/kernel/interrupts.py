"""Interrupt what the main thread runs for the notebook, and nothing that follows it.

An interrupt names the message that is to stop: a cell, a push or a pull. It may come late, for
messages travel, a step must be whole first (`defer_interrupt`), and Python may drop the exception
(`shell`). So SIGINT is sent in here alone, under a lock, and only while that message runs; a
message takes the lock to end. When it has ended no SIGINT is on its way any more.

One from elsewhere (`kill -INT`) names nothing: it strikes what runs, and is dropped in between.

Threads: `begin` and `end` on the main thread; all else on any.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Interrupts:
    """The message that runs, and the newest that was to stop."""

    def __init__(self) -> None:
        self.running: str | None = None  # the id of the message that may be interrupted
        # Of the newest that was to stop: it may not have begun yet.
        self._wanted: str | None = None
        self._lock = threading.Lock()

    def begin(self, message: str) -> None:
        """Let this message be interrupted until `end`.

        Raises:
            KeyboardInterrupt: It was to stop before it began.
        """
        with self._lock:
            self.running = message
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # After the handler is there: from here on either this or the handler sees an order.
        if self._wanted == message:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Let nothing be interrupted any more; a second call does nothing."""
        signal.signal(signal.SIGINT, drop)
        with self._lock:
            self.running = None
        if signal.SIGINT in signal.sigpending():  # blocked, and may yet be let through
            signal.sigwait([signal.SIGINT])

    def order(self, message: str) -> bool:
        """Interrupt a message, also one that is still to begin; return whether it runs."""
        self._wanted = message
        return self.strike(message)

    def strike(self, message: str | None) -> bool:
        """Interrupt the main thread if it still runs this message; return whether it does."""
        with self.while_it_runs(message) as runs:
            if runs:
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)
        return runs

    @contextmanager
    def while_it_runs(self, message: str | None) -> Iterator[bool]:
        """Give whether this message runs; if it does, it does not end before this."""
        with self._lock:
            yield self.running == message

    def after_fork(self) -> None:
        """Begin with a free lock in a fork: another thread may have held it."""
        self._lock = threading.Lock()
        sys.excepthook = without_hung_up_readers(sys.excepthook)


def drop(*_: object) -> None:
    """Be the handler of a SIGINT that nothing is there for."""


def without_hung_up_readers(native: Hook) -> Hook:
    """Return an excepthook that says nothing of a reader that has gone.

    An interrupted loop ends while its DataLoader's workers hand over tensors. multiprocessing then
    has each worker's hook print that its connection was reset.
    """

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> object:
        name = trace.tb_frame.f_globals.get("__name__") if trace is not None else ""
        has_hung_up = isinstance(error, ConnectionError | EOFError)
        if has_hung_up and name == "multiprocessing.resource_sharer":
            return None
        return native(kind, error, trace)

    return hook


here = Interrupts()
os.register_at_fork(after_in_child=here.after_fork)
