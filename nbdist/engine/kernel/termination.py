"""SIGTERM on a host that is told to leave: Slurm and systemd send it to every process there.

The ranks' parent tells the notebook, which may save a training first. A rank that ended at once
would take that away.
"""

import os
import signal
from types import FrameType

_rank = 0


def leave_to_parent() -> None:
    """Let SIGTERM not end this rank, but the processes that it forks. Main thread."""
    global _rank
    _rank = os.getpid()
    # A handler, not SIG_IGN, which commands that a cell starts would inherit.
    signal.signal(signal.SIGTERM, _on_term)


def _on_term(number: int, _frame: FrameType | None) -> None:
    if os.getpid() != _rank:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
