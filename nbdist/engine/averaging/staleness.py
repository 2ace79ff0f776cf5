"""Decide which update a server may apply now, and summarize how stale updates were. Pure.

An update is *stale* by as many versions as were written between the parameters it was computed on
and itself. With a bound, fast workers wait for slow ones, as under stale synchronous parallel (Ho
et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS
2013), where the bound is on steps; ours is on the measured staleness, and holds for every update.

Each outstanding read is a job with a deadline: its update must be applied before the version passes
read + bound. One update makes one version. So all deadlines can be kept as long as they can be kept
in their order, and with n workers a bound of n - 1 always can.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Update:
    """One applied update: computed by `worker` on version `read`, it made version `written`."""

    worker: int
    read: int
    written: int

    @property
    def staleness(self) -> int:
        """Updates of others that came between."""
        return self.written - 1 - self.read


@dataclass(frozen=True, slots=True)
class Staleness:
    """The staleness of all workers' updates so far.

    Attributes:
        updates: Applied.
        total: Sum of their staleness.
        max: Of one update.
        newest: Of this rank's last update; None before it.
        dropped: Updates that a bound left out: of workers that came back after a cell had ended.
    """

    updates: int = 0
    total: int = 0
    max: int = 0
    newest: int | None = None
    dropped: int = 0

    @property
    def mean(self) -> float:
        """Of all updates; 0 before the first."""
        return self.total / self.updates if self.updates else 0.0

    def __str__(self) -> str:
        """Return e.g. `mean 0.95, max 2 over 20 updates`."""
        said = f"mean {self.mean:.2f}, max {self.max} over {self.updates} updates"
        return said + (f", {self.dropped} dropped" if self.dropped else "")


def is_feasible(version: int, reads: Iterable[int], bound: int | None) -> bool:
    """Return whether every outstanding read can be followed by its update in time.

    Args:
        version: The newest one; the next update is stale by `version - read`.
        reads: The versions that were read and have had no update yet.
        bound: The most that an update may be stale; None for no bound.
    """
    if bound is None:
        return True
    return all(version + place - read <= bound for place, read in enumerate(sorted(reads)))


def may_apply(worker: int, version: int, reads: Mapping[int, int], bound: int | None) -> bool:
    """Return whether this worker's update may be next: all others must still be in time after it.

    Args:
        worker: Whose.
        version: The newest one.
        reads: The outstanding read of each worker, this one included.
        bound: As in `is_feasible`.
    """
    return is_feasible(version + 1, (r for w, r in reads.items() if w != worker), bound)
