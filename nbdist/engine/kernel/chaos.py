"""Make the cell that runs on this rank raise, wherever it is: for `%dist chaos`.

Python raises an exception that another thread has set before its next instruction. While the main
thread is inside C++, as in a collective, that is when it comes back from there.

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

    No RuntimeError: it may strike within a `try` that expects one, and be lost there.
    """

    def __init__(self) -> None:
        super().__init__("raised on purpose by %dist chaos")


class Chaos(Component):
    """Whether a cell runs here that may be made to fail, and whether it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs_cell = False
        self._is_planned = False  # in this cell

    def cell_began(self, start: CellStart) -> None:
        """Allow `fail`, until the cell ends."""
        self._is_planned, self._runs_cell = False, True

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Refuse `fail` again, and catch one that has not struck yet: it would end the engine."""
        try:
            self._runs_cell = False  # first: `fail` sets nothing after the lock is had
            with self._lock:
                is_planned = self._is_planned
            if is_planned:
                # It may have struck or not: so it is set again, and caught. To clear it instead
                # would leave CPython's eval breaker set for ever, and all Python code of the rank
                # slower.
                _raise_soon()
                for _ in range(1000):
                    pass  # CPython looks for it at each turn of a loop
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
        """Interrupt the cell that runs here, whichever it is; return whether one does."""
        with self._lock:
            return self._runs_cell and interrupts.here.strike(interrupts.here.running)


def _raise_soon() -> None:
    main = threading.main_thread().ident
    assert main is not None
    error = ctypes.py_object(PlannedFault)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), error)


here = Chaos()
