"""Faults from outside: signals to ranks, interrupts of this process, second faults in a repair.

A cell asks for one by a file (`on_rank.strike`); a thread sees it, waits for as long as the trial
says, and strikes. Second faults come on the thread that notes an event of the cluster.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nbdist import Session
from tests.random.acts import Fault
from tests.random.on_rank import TOLD

_FROM_OUTSIDE = ("killed from outside", "interrupt", "interrupt a hang", "SIGSTOP, SIGCONT")
_STOPPED_S = 0.5


def pid_of(session: Session, rank: int) -> int:
    """Return the process of a rank, as the session knows it now."""
    pid: int = session._cluster.ranks[rank].pid
    return pid


@contextmanager
def strikes(session: Session, fault: Fault, flag: str) -> Iterator[None]:
    """Strike while the block runs, when a cell asks for it."""
    over = threading.Event()
    stop_listening: Callable[[], None] | None = None
    thread = None
    if fault.kind in _FROM_OUTSIDE:
        pid = pid_of(session, fault.ranks[0])
        thread = threading.Thread(target=_strike, args=(fault, pid, Path(flag + TOLD), over))
        thread.start()
    if fault.kind == "second in the repair":
        stop_listening = session._cluster.events.listen(_second(session, fault))
    try:
        yield
    finally:
        over.set()
        if stop_listening is not None:
            stop_listening()
        if thread is not None:
            thread.join()
        if fault.kind == "killed from outside" and Path(flag + TOLD).exists():
            # It may have been after the cell: what runs next must find it dead.
            deadline = time.monotonic() + 30
            state = session._cluster.ranks[fault.ranks[0]]
            while state.alive and pid == pid_of(session, fault.ranks[0]):
                assert time.monotonic() < deadline
                time.sleep(0.005)


def _strike(fault: Fault, pid: int, told: Path, over: threading.Event) -> None:
    while not told.exists():
        # The cell may ask and end between two looks.
        if over.wait(0.005) and not told.exists():
            return
    if fault.kind == "SIGSTOP, SIGCONT":
        over.wait(_STOPPED_S + fault.delay_s)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        return
    over.wait(fault.delay_s)
    if fault.kind == "killed from outside":
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    elif not over.is_set():
        os.kill(os.getpid(), signal.SIGINT)


def _second(session: Session, fault: Fault) -> Callable[[str], None]:
    """Return a listener that kills a second rank when the first has a new process."""
    waits = ["process started" if fault.delay_s else "replaced"]

    def hear(event: str) -> None:
        if waits and event == waits[0]:
            waits.pop()
            with suppress(ProcessLookupError):
                os.kill(pid_of(session, fault.second or 0), signal.SIGKILL)

    return hear
