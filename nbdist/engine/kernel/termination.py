"""SIGTERM on a host that is shut down: Slurm and systemd send it to every process there.

The ranks' parent notifies the notebook, which may save a training first. A rank that ended at
once would prevent that.
"""

import os
import signal
from types import FrameType


def leave_to_parent() -> None:
    """Make SIGTERM end the processes that this rank forks, but not the rank. Main thread."""
    rank = os.getpid()

    def on_term(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != rank:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # A handler, not SIG_IGN, which commands that a cell starts would inherit.
    signal.signal(signal.SIGTERM, on_term)
