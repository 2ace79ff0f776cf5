"""The ranks' monotonic clocks beside the notebook's, with a bound on the error.

Ranks that read the notebook's own clock (`nbdist.shared.clock`) need nothing. Another host's clock
is read through the control channel, some times in a row: what it showed lies between asking and
hearing, so the least round trip tells most, and half of it bounds the error. A clock also drifts:
over minutes evenly, so readings at several moments narrow each other.

Threads: `begin` on the main one; everything else belongs to `nbdist-analysis`, so that neither a
cell nor its steps wait for a reading.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from nbdist.shared import clock
from nbdist.shared.errors import NBDistError

PINGS = 8  # a few milliseconds each
REFRESH_S = 30.0
MAX_DRIFT = 500e-6  # the most by which Linux slews its clock (adjtimex)
MOST_SIGHTINGS = 16
_ANSWER_S = 1.0
_AGAIN_S = 1.0  # between the first readings, and after one that failed

_log = logging.getLogger("nbdist.analysis")


@dataclass(frozen=True, slots=True)
class Ping:
    """One reading: when it was asked for and heard, here, and what the clock showed there."""

    asked_ns: int
    heard_ns: int
    there_ns: int

    @property
    def round_trip_ns(self) -> int:
        """How long it took."""
        return self.heard_ns - self.asked_ns


@dataclass(frozen=True, slots=True)
class Sighting:
    """At `there_ns` of another clock, ours showed from `least_ns` to `most_ns` more than it."""

    there_ns: int
    least_ns: float
    most_ns: float


def sight(pings: Iterable[Ping]) -> Sighting:
    """Return what the fastest of several readings tells."""
    ping = min(pings, key=lambda ping: ping.round_trip_ns)
    return Sighting(ping.there_ns, ping.asked_ns - ping.there_ns, ping.heard_ns - ping.there_ns)


def offset(sightings: Sequence[Sighting], moment_ns: int) -> tuple[float, float]:
    """Return the offset at a moment of the other clock, and the bound of its error, in ns.

    Taken are all straight lines that pass each sighting between its least and its most, and are no
    steeper than `MAX_DRIFT`: the offset lies between the lowest and the highest of them at that
    moment. In the plane two of the bounds decide, so pairs are enough. Where no line fits, the
    drift has changed: the oldest sightings are left out.

    Args:
        sightings: In the order of their moments, at least one.
        moment_ns: May lie before, between or after them.
    """
    for first in range(len(sightings)):
        least, most = _range(sightings[first:], moment_ns)
        if least <= most:
            return (least + most) / 2, (most - least) / 2
    raise AssertionError("one sighting alone has always a line")


def _range(sightings: Sequence[Sighting], t: int) -> tuple[float, float]:
    least = max(s.least_ns - MAX_DRIFT * abs(t - s.there_ns) for s in sightings)
    most = min(s.most_ns + MAX_DRIFT * abs(t - s.there_ns) for s in sightings)
    for i, a in enumerate(sightings):
        for b in sightings[i + 1 :]:
            if a.there_ns == b.there_ns:
                continue
            share = (t - a.there_ns) / (b.there_ns - a.there_ns)
            if share > 1:  # behind both: the steepest line leaves a at its other bound
                least = max(least, b.least_ns + (share - 1) * (b.least_ns - a.most_ns))
                most = min(most, b.most_ns + (share - 1) * (b.most_ns - a.least_ns))
            elif share < 0:
                least = max(least, a.least_ns - share * (a.least_ns - b.most_ns))
                most = min(most, a.most_ns - share * (a.most_ns - b.least_ns))
            else:
                least = max(least, a.least_ns + share * (b.least_ns - a.least_ns))
                most = min(most, a.most_ns + share * (b.most_ns - a.most_ns))
    return least, most


class Clocks:
    """The clocks of a session's ranks.

    Attributes:
        error_ns: How far apart two ranks' moments of the same instant can be at most.
    """

    def __init__(
        self,
        ask: Callable[[int], "Future[dict[str, Any]]"],
        now_ns: Callable[[], int] = time.perf_counter_ns,
        identity: str | None = None,
    ) -> None:
        """Know nothing yet.

        Args:
            ask: Asks a rank for `nbdist.shared.clock.read`.
            now_ns: The notebook's clock.
            identity: Its name; found out when None.
        """
        self.error_ns = 0
        self._ask = ask
        self._now_ns = now_ns
        self._own = clock.identity() if identity is None else identity
        self._processes: dict[int, int] = {}
        self._names: dict[int, str] = {}  # rank to its clock's
        self._sightings: dict[str, list[Sighting]] = {}
        self._due_ns: dict[str, int] = {}
        self._ask_again_ns = 0

    def begin(self, processes: Mapping[int, int]) -> None:
        """Forget ranks whose process is another now. Main thread, between cells."""
        changed = [rank for rank, which in processes.items() if self._processes.get(rank) != which]
        self._names = {r: name for r, name in self._names.items() if r not in changed}
        self._processes = dict(processes)

    def offset_ns(self, rank: int, moment_ns: int) -> int | None:
        """Return what to add to a rank's moment for the notebook's; None when not known."""
        name = self._names.get(rank)
        if name is None:
            return None
        if name == self._own:
            return 0
        return round(offset(self._sightings[name], moment_ns)[0])

    def refresh(self, ranks: Sequence[int]) -> None:
        """Read the clocks that are not known, and those known for too long; seldom blocks."""
        now_ns = self._now_ns()
        unknown = [rank for rank in ranks if rank not in self._names]
        if unknown and now_ns >= self._ask_again_ns:
            self._ask_again_ns = now_ns + int(_AGAIN_S * 1e9)
            self._meet(unknown)
        others = {name: rank for rank, name in self._names.items() if name != self._own}
        for name, rank in others.items():
            if now_ns >= self._due_ns.get(name, 0):
                self._measure(name, rank, now_ns)
        self.error_ns = self._error_ns({self._names[r] for r in ranks if r in self._names})

    def _meet(self, ranks: Sequence[int]) -> None:
        for rank, (answer, ping) in self._read(ranks).items():
            name = answer["identity"]
            if name == self._own and not ping.asked_ns <= ping.there_ns <= ping.heard_ns:
                # A copy of a virtual machine: it has the same boot's name and another clock.
                name = f"{name} on rank {rank}"
            name = name or f"of rank {rank}"
            if name != self._own:
                self._sightings.setdefault(name, [sight([ping])])
            self._names[rank] = name

    def _measure(self, name: str, rank: int, now_ns: int) -> None:
        readings = [self._read([rank]).get(rank) for _ in range(PINGS)]
        pings = [reading[1] for reading in readings if reading is not None]
        sightings = self._sightings[name]
        if pings:
            sightings = self._sightings[name] = [*sightings, sight(pings)][-MOST_SIGHTINGS:]
        # Often at first, for one reading says nothing of the drift.
        age_ns = sightings[-1].there_ns - sightings[0].there_ns
        wait_ns = min(max(age_ns, int(_AGAIN_S * 1e9)), int(REFRESH_S * 1e9))
        self._due_ns[name] = now_ns + wait_ns

    def _read(self, ranks: Sequence[int]) -> dict[int, tuple[dict[str, Any], Ping]]:
        """Read the clocks of ranks at once; of those that do not answer soon nothing is said."""
        heard: dict[int, int] = {}
        asked: dict[int, tuple[int, Future[dict[str, Any]]]] = {}
        try:
            for rank in ranks:
                asked_ns = self._now_ns()
                future = self._ask(rank)
                future.add_done_callback(lambda _, rank=rank: heard.update({rank: self._now_ns()}))  # type: ignore[misc]
                asked[rank] = asked_ns, future
        except NBDistError as error:
            _log.debug("a clock could not be read: %s", error)
        found = {}
        until_s = time.monotonic() + _ANSWER_S
        for rank, (asked_ns, future) in asked.items():
            try:
                answer = future.result(max(0.0, until_s - time.monotonic()))
                # Whoever waits for a future may go on before its callbacks have run.
                ping = Ping(asked_ns, heard.get(rank, self._now_ns()), answer["now_ns"])
                found[rank] = answer, ping
            except (NBDistError, TimeoutError) as error:
                _log.debug("the clock of rank %d could not be read: %s", rank, error)
        return found

    def _error_ns(self, names: set[str]) -> int:
        """Return the most that two of these clocks can be apart: the two worst, for they add up."""
        now_ns = self._now_ns()
        bounds = []
        for name in names - {self._own}:
            sightings = self._sightings[name]
            near_ns = now_ns - round(sightings[-1].least_ns)
            bounds.append(offset(sightings, near_ns)[1])
        if len(names) < 2:
            return 0  # one clock, whoever's it is
        return round(sum(sorted(bounds)[-2:]))
