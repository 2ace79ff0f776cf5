"""Events in a GPU's streams, and their times on the host's clock.

Now and then an event is recorded on a separate, empty stream, and queried
until it has passed, 0.2 ms at most: the middle between is its time, and half of that the error
(some 10 us; `Anchor.error_ns`). Other events are timed by `elapsed_time` from the newest anchor
(float32 milliseconds: 0.1 us after a second), on which the GPU's clock drifts some 50 us at most
with a second between anchors. No time lies before the host recorded the event or after it was
seen.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nbdist.engine.compat import torch_hooks
from nbdist.engine.tap.collective import LaunchedCollective


class Event(Protocol):
    """A `torch.cuda.Event` with timing."""

    def query(self) -> bool:
        """Return whether the GPU has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return milliseconds from here to a later one."""


class Gpu:
    """The functions of `torch.cuda` that are used; a test replaces them."""

    def __init__(self) -> None:
        self._empty: dict[torch.device, Any] = {}

    def mark(self, device: torch.device) -> Event:
        """Record an event on the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def mark_alone(self, device: torch.device) -> Event:
        """Record one on a stream on which nothing else is queued."""
        stream = self._empty.get(device)
        if stream is None:
            stream = self._empty[device] = torch.cuda.Stream(device)
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def stream(self, device: torch.device) -> int:
        """Return the current stream of this thread."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def can_mark(self) -> bool:
        """Return whether events recorded now show when the GPU runs what is launched now."""
        return not (torch_hooks.is_coalescing() or torch.cuda.is_current_stream_capturing())


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event whose time is known."""

    event: Event
    moment_ns: int
    error_ns: int

    def moment_of(self, mark: "CudaMark", seen_ns: int) -> int:
        """Return when the GPU passed an event that was recorded after this one."""
        moment_ns = self.moment_ns + round(self.event.elapsed_time(mark.event) * 1e6)
        return min(max(moment_ns, mark.recorded_ns), seen_ns)


@dataclass(frozen=True, slots=True)
class CudaMark:
    """An event in a stream, and when the host recorded it."""

    event: Event
    recorded_ns: int
    anchor: Anchor
    stream: int


@dataclass(slots=True)
class EventSpan:
    """A collective, or a wait of the compute stream where `launch` is None.

    `end` is known later; where the host saw it, `end_ns` is instead. A wait lasts no longer than
    `cut_by`.
    """

    step: int
    begin: CudaMark
    launch: LaunchedCollective | None = None
    end: CudaMark | None = None
    end_ns: int = 0
    is_exposed: bool = False
    cut_by: LaunchedCollective | None = None

    def is_over(self) -> bool:
        """Return whether the GPU is through."""
        if self.end is None:
            return self.end_ns > 0 and self.begin.event.query()
        return self.end.event.query()
