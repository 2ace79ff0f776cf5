"""Where a board is seen, and whether the notebook shows what its cell has left.

A view of it says hello when it opens and goodbye when its output goes: the cell's outputs were
cleared, or what the cell leaves has taken their place. A page that is closed or opened again says
nothing, so its views count until the end. Any thread.
"""

import threading
import time
from typing import Any


class Views:
    """The views of one board, in all pages."""

    def __init__(self) -> None:
        self._there: set[str] = set()
        self._gone_at = 0.0

    def hello(self, view: str) -> None:
        """One has opened."""
        self._there.add(view)

    def goodbye(self, view: str) -> None:
        """The output of one has gone."""
        self._there.discard(view)
        self._gone_at = time.monotonic()

    def were_cleared(self, for_s: float) -> bool:
        """Return, once, whether all have gone so long ago: a cell that is moved opens another."""
        was = not self._there and 0 < self._gone_at < time.monotonic() - for_s
        if was:
            self._gone_at = 0.0
        return was


class End:
    """What a cell leaves whose page was opened again, until one place of the notebook shows it."""

    def __init__(self) -> None:
        self.left: list[dict[str, Any]] | None = None
        self._lock = threading.Lock()
        self._is_shown = threading.Event()
        self._is_asked = False

    @property
    def is_shown(self) -> bool:
        """Whether a place shows it."""
        return self._is_shown.is_set()

    def is_shown_within(self, time_s: float) -> bool:
        """Wait for a place to show it; return whether one does."""
        return self._is_shown.wait(time_s)

    def shown(self) -> bool:
        """One shows it; return whether it is the first."""
        with self._lock:
            was = self._is_shown.is_set()
            self._is_shown.set()
            return not was

    def ask(self) -> bool:
        """Return whether a page shall take it in: one is asked, so that two save no same file."""
        with self._lock:
            asks = self.left is not None and not (self._is_asked or self.is_shown)
            self._is_asked = self._is_asked or asks
            return asks
