"""Raise an exception in the cell that runs on this rank: for `%dist chaos`.

Python raises an exception that another thread has set before its next instruction. While the main
thread is inside C++, as in a collective, it is raised when the call returns.

Threads: `fail` and `interrupt` on the control thread, a cell's begin and end on the main one.
"""

import ctypes
import threading
from collections.abc import Iterable

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.kernel import interrupts
from nbdist.shared.wire import CellStart


class PlannedFault(Exception):
    """Raised on purpose by `%dist chaos`.

    Not a RuntimeError: a `try` that expects one could swallow it.
    """

    def __init__(self) -> None:
        super().__init__("raised on purpose by %dist chaos")


class Chaos(Component):
    """Makes the running cell fail on request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs_cell = False
        self._is_planned = False  # in this cell

    def cell_began(self, start: CellStart) -> None:
        """Allow `fail`, until the cell ends."""
        self._is_planned, self._runs_cell = False, True

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Refuse `fail` again, and catch a pending exception: it would end the engine."""
        try:
            self._runs_cell = False  # first: `fail` sets nothing once the lock is held
            with self._lock:
                is_planned = self._is_planned
            if is_planned:
                # It may have been raised or not: so it is set again, and caught. Clearing it
                # instead would leave CPython's eval breaker set for ever, and make all Python code
                # of the rank slower.
                _raise_soon()
                for _ in range(1000):
                    pass  # CPython checks for it at each turn of a loop
        except PlannedFault:
            pass
        finally:
            self._runs_cell = False
        return ()

    def fail(self) -> bool:
        """Make the main thread raise `PlannedFault`; return whether a cell runs there."""
        with self._lock:
            if self._runs_cell:
                self._is_planned = True
                _raise_soon()
            return self._runs_cell

    def interrupt(self) -> bool:
        """Interrupt the running cell; return whether there is one."""
        with self._lock:
            return self._runs_cell and interrupts.here.strike(interrupts.here.running)


def _raise_soon() -> None:
    main = threading.main_thread().ident
    assert main is not None
    error = ctypes.py_object(PlannedFault)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), error)


here = Chaos()
