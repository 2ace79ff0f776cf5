"""How many samples a second this rank works through by itself: forward, backward and data.

Waiting for other ranks is no work, and the optimizer's step takes as long for any batch.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median

STEPS = 50  # that are looked back on


class Pace:
    """The pace of one rank over its last steps, also those of earlier cells."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=STEPS)

    def note(self, values: Mapping[str, float]) -> None:
        """Take in a step's values; one without samples or without `comm_s` tells no pace."""
        own_s = values.get("compute_s", 0.0) + values.get("data_s", 0.0)
        if "comm_s" in values and "samples" in values and own_s > 0:
            self._seen.append(values["samples"] / own_s)

    def now(self) -> float:
        """Return samples a second, the median of steps; 0 while it is not known."""
        return median(self._seen) if len(self._seen) > 2 else 0.0
