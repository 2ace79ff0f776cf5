"""Report the kernel's counters of gloo's connections to the notebook: passively, and seldom.

All ranks of a ring are equally slow when one link is. What distinguishes them is how long each
connection had something to send for the bytes it sent, and how long an answer took. That sends
no extra byte: the kernel counts it anyway.

A record of kind "links" holds it for the connections that carried most since the last one; its
names are in `wire.Record`. Not on Linux, or without gloo, there is none.

Threads: `sample` runs on the thread that publishes records; `cell_began` on the main one.
"""

import time
from collections.abc import Callable
from contextlib import suppress

from nbdist.engine.component import Component
from nbdist.engine.group import sockets, state
from nbdist.engine.group.links import tcp_info
from nbdist.shared.errors import ClusterError
from nbdist.shared.wire import CellStart

INTERVAL_S = 0.5
LEAST_STEPS = 10  # between two samples
MOST_COST = 1e-3  # of a core's time
LOOK_AGAIN_S = 5.0  # for connections of groups that were made meanwhile
SMALL = 0.01  # of the busiest connection's bytes, either way: less is not reported
MOST_REPORTED = 16  # connections in a record: of 64 ranks that exchange all with all, the busiest


class LinkStats(Component):
    """The connections of this rank, as of the last sample."""

    def __init__(
        self, current_step: Callable[[], int], report: Callable[[int, dict[str, float]], None]
    ) -> None:
        """Begin to sample.

        Args:
            current_step: Returns the steps of the cell so far.
            report: Called with a step and the values of a record.
        """
        self._current_step = current_step
        self._report = report
        self._pairs: list[sockets.GlooPair] = []
        self._looked = 0.0
        self._next = 0.0
        self._step = 0
        self._before: dict[str, tcp_info.Counts] = {}

    def cell_began(self, start: CellStart) -> None:
        """Earlier traffic, such as a clone, belongs to no cell."""
        self._step = 0
        self._before = {}

    def sample(self) -> None:
        """Make a record, when a step has been made and it is time."""
        now, began = time.monotonic(), time.thread_time()
        step = self._current_step()
        if step == 0 or (self._before and (now < self._next or step < self._step + LEAST_STEPS)):
            return
        before, counts = self._before, self._read(now)
        self._before, self._step = counts, step
        self._next = now + max(INTERVAL_S, (time.thread_time() - began) / MOST_COST)
        values = passed(before, counts)
        if values:
            self._report(step, values)

    def _read(self, now: float) -> dict[str, tcp_info.Counts]:
        here = state.here.place()
        if here is None or "gloo" not in here.backend:
            return {}
        if now - self._looked > LOOK_AGAIN_S or not self._before:
            self._pairs = sockets.pairs(here.address, here.peers)
            self._looked = now
        counts = {}
        for pair in self._pairs:
            read = pair.use(tcp_info.read)
            if read is not None:
                counts[_name(pair)] = read
        return counts


def received_bytes() -> int:
    """Return the bytes that this rank has received from the others so far: `nbdist.received_bytes`.

    The difference of two calls is what gloo has received between them, headers of the network
    aside. A fault or another number of ranks makes new connections, which count from 0. Any thread.

    Raises:
        ClusterError: This rank is in no group, has no gloo, or its system does not count.
    """
    here = state.here.member()
    if "gloo" not in here.backend:
        raise ClusterError(
            "Bytes cannot be counted here.",
            why=f"this group's backend is {here.backend}, and only gloo sends through TCP.",
            do="%dist start --device cpu",
        )
    counts = _counts(here)
    if counts and not any(counts):
        raise ClusterError(
            "Bytes cannot be counted here.", why="only Linux counts the bytes of a connection."
        )
    return sum(count.received_bytes for count in counts if count)


def quiet_s() -> float | None:
    """Return for how long no byte has come or gone (`Counts`); None where unknown. Any thread.

    Of what NCCL sends nothing is known.
    """
    here = state.here.place()
    if here is None or "gloo" not in here.backend:
        return None
    with suppress(OSError):  # no descriptor is left to look with
        return min((count.quiet_s for count in _counts(here) if count), default=None)
    return None


def _counts(here: state.GroupState) -> list[tcp_info.Counts | None]:
    return [pair.use(tcp_info.read) for pair in sockets.pairs(here.address, here.peers)]


def passed(
    before: dict[str, tcp_info.Counts], after: dict[str, tcp_info.Counts]
) -> dict[str, float]:
    """Return a record's values: the traffic between two samples, if any."""
    moved = {
        name: max(
            now.sent_bytes - before[name].sent_bytes,
            now.received_bytes - before[name].received_bytes,
        )
        for name, now in after.items()
        if name in before
    }
    least = max(1.0, SMALL * max(moved.values(), default=0))
    most = sorted((name for name in moved if moved[name] >= least), key=moved.__getitem__)
    values: dict[str, float] = {}
    for name in sorted(most[-MOST_REPORTED:]):
        was, now = before[name], after[name]
        values[f"{name}.sent_bytes"] = float(now.sent_bytes - was.sent_bytes)
        values[f"{name}.busy_s"] = now.busy_s - was.busy_s
        values[f"{name}.resent_bytes"] = float(now.resent_bytes - was.resent_bytes)
        values[f"{name}.rtt_s"] = now.rtt_s
    return values


def _name(pair: sockets.GlooPair) -> str:
    host, port = pair.caller
    peer = "" if pair.peer is None else pair.peer
    return f"{peer}@{host}:{port}"
