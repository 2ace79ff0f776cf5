"""Interrupt the message that the main thread runs for the notebook, and no later one.

An interrupt names the message to stop: a cell, a push or a pull. It may come late, for
messages take time, a step must be completed first (`defer_interrupt`), and Python may drop the
exception (`shell`). So SIGINT is sent only here, under a lock, and only while that message runs; a
message takes the lock to end. When it has ended no SIGINT is on its way any more.

One from elsewhere (`kill -INT`) names none: it interrupts what runs, or is dropped.

Threads: `begin` and `end` on the main thread; the rest on any.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Interrupts:
    """The running message, and the newest one to stop."""

    def __init__(self) -> None:
        self.running: str | None = None  # the id of the message that may be interrupted
        # Of the newest message to stop: it may not have begun yet.
        self._wanted: str | None = None
        self._lock = threading.Lock()
        # Of a cell that awaits, whose SIGINT has another handler, and whose code runs.
        self.in_code: Callable[[int, FrameType | None], object] = signal.default_int_handler

    def begin(self, message: str) -> None:
        """Allow interrupts of this message until `end`.

        Raises:
            KeyboardInterrupt: It was to stop before it began.
        """
        with self._lock:
            self.running = message
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # After the handler is set: from here on either this check or the handler sees an order.
        if self._wanted == message:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Stop allowing interrupts; a second call does nothing."""
        signal.signal(signal.SIGINT, drop)
        with self._lock:
            self.running = None
        if signal.SIGINT in signal.sigpending():  # blocked, and could be delivered later
            signal.sigwait([signal.SIGINT])

    def order(self, message: str) -> bool:
        """Interrupt a message, even before it begins; return whether it runs."""
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
        """Yield whether this message runs; if it does, it does not end within the block."""
        with self._lock:
            yield self.running == message

    def after_fork(self) -> None:
        """Make a new lock in a fork: another thread may have held it."""
        self._lock = threading.Lock()
        sys.excepthook = without_hung_up_readers(sys.excepthook)


def drop(*_: object) -> None:
    """Ignore a SIGINT when nothing runs."""


def without_hung_up_readers(native: Hook) -> Hook:
    """Return an excepthook that is silent about a closed reader.

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
