"""Count interrupts instead of raising them, while ranks must be left settled.

A KeyboardInterrupt can come out of any line. In the midst of forming the group anew, or of
putting a cell's pictures in place, it would leave half of the work done. While a cell runs, an
interrupt is therefore a number that the cell's loop looks at, every 100 ms or sooner.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """A context manager; `count` tells how often the person has interrupted since.

    On any other thread than the main one nothing changes: Python delivers signals there only.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        self.count = 0
        self._before: Any = None
        self._is_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "Interrupts":
        if self._is_main:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_main:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Nothing but counting: whatever lock the interrupted line holds is not ours to take.
        self.count += 1
