"""What runs on the hosts, and how what ran has ended: for a kernel that attaches later. Pure."""

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

_MOST_ENDED: Final = (
    1000  # a cluster whose ranks die that often with no kernel attached has no state
)


class ProcessTable:
    """Follows the events of parents. A kernel compares it with what the one before it knew."""

    def __init__(self) -> None:
        """Begin with nothing running."""
        self._running: dict[str, dict[str, int]] = {}  # pids by key, by channel
        self._ended: deque[dict[str, Any]] = deque(maxlen=_MOST_ENDED)
        self._lost: list[dict[str, Any]] = []

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event that the kernel is told, too."""
        name = event["event"]
        if name == "started":
            self._running.setdefault(event["channel"], {})[event["key"]] = event["pid"]
        elif name == "exited":
            of_channel = self._running.get(event["channel"], {})
            if of_channel.get(event["key"]) == event["pid"]:
                del of_channel[event["key"]]
            self._ended.append(dict(event))
        elif name in ("lost", "closed"):
            self._lost.append(dict(event))

    def told(self) -> dict[str, Any]:
        """Return `running` (pids by key, by channel), and the events `ended` and `lost`."""
        return {"running": self._running, "ended": list(self._ended), "lost": self._lost}
