"""SIGTERM on a host that is told to leave: Slurm and systemd send it to every process there.

The ranks' parent tells the notebook, which may save a training first. A rank that ended at once
would take that away.
"""

import os
import signal
from types import FrameType


def leave_to_parent() -> None:
    """Let SIGTERM not end this rank, but the processes that it forks. Main thread."""
    rank = os.getpid()

    def on_term(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != rank:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # A handler, not SIG_IGN, which commands that a cell starts would inherit.
    signal.signal(signal.SIGTERM, on_term)
