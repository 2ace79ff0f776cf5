"""Make the cell that runs on this rank raise, wherever it is: for `%dist chaos`.

Python raises an exception that another thread has set before its next instruction. While the main
thread is inside C++, as in a collective, that is when it comes back from there.

Threads: `fail` and `interrupt` on the control thread, `begin_cell` and `end_cell` on the main one.
"""

import ctypes
import threading

from nbdist.engine.kernel import interrupts


class PlannedFault(Exception):
    """Raised on purpose by `%dist chaos`.

    No RuntimeError: it may strike within a `try` that expects one, and be lost there.
    """

    def __init__(self) -> None:
        super().__init__("raised on purpose by %dist chaos")


_lock = threading.Lock()
_runs_cell = False
_is_planned = False  # in this cell


def begin_cell() -> None:
    """Allow `fail`, until the cell ends."""
    global _is_planned, _runs_cell
    _is_planned, _runs_cell = False, True


def end_cell() -> None:
    """Refuse `fail` again, and catch one that has not struck yet: it would end the engine."""
    global _runs_cell
    try:
        _runs_cell = False  # first: `fail` sets nothing after the lock is had
        with _lock:
            is_planned = _is_planned
        if is_planned:
            # It may have struck or not: so it is set again, and caught. To clear it instead would
            # leave CPython's eval breaker set for ever, and all Python code of the rank slower.
            _raise_soon()
            for _ in range(1000):
                pass  # CPython looks for it at each turn of a loop
    except PlannedFault:
        pass
    finally:
        _runs_cell = False


def fail() -> bool:
    """Make the main thread raise `PlannedFault`; return whether a cell runs there."""
    global _is_planned
    with _lock:
        if _runs_cell:
            _is_planned = True
            _raise_soon()
        return _runs_cell


def interrupt() -> bool:
    """Interrupt the cell that runs here, whichever it is; return whether one does."""
    with _lock:
        return _runs_cell and interrupts.strike(interrupts.running)


def _raise_soon() -> None:
    main = threading.main_thread().ident
    assert main is not None
    error = ctypes.py_object(PlannedFault)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), error)
