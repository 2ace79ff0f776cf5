"""`%dist probe`: what to measure, and what to say of links, computing and data. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Final

from nbdist.client.cells.trained_cell import TrainedCell
from nbdist.shared.collectives import COLLECTIVES, rounds
from nbdist.shared.text import aligned, counted, figure, name_bytes, name_ranks, name_rate
from nbdist.study.fit import Fit, fit
from nbdist.study.links import Link
from nbdist.study.preset import median_rates, name_flops

_MOST_PAIRS = 28  # all of eight ranks
_FASTER: Final = 2.0  # times the bandwidth: another kind of link
_SOONER: Final = 4.0  # of the latency
_SLOW: Final = 0.8  # of the median rate of computing
_WAITS: Final = 0.1  # of a step: less is no reason to look at the loader
_BUCKET: Final = 25_000_000  # bytes: about what DDP sends at once

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class PairLink:
    """Between two ranks: seconds that a short message takes, and bytes a second of a long one.

    They are those of the slower direction. `points` are bytes and seconds of its messages;
    `sender` is the rank that sends in it where the other direction is twice as fast or more.
    """

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_s: float
    bandwidth: float
    points: Points = ()
    sender: int | None = None

    @property
    def is_inside(self) -> bool:
        """Whether both are on one host."""
        return self.hosts[0] == self.hosts[1]


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Pairs whose links are alike, and the line through all of their messages.

    `name` is "inside a host" or "between hosts", "slower" or the like behind it.
    """

    name: str
    pairs: tuple[PairLink, ...]
    fit: Fit

    @property
    def link(self) -> Link:
        """What a rank has of it, for forecasts."""
        return Link(self.fit.latency_s, self.fit.bandwidth, self.name, "measured by %dist probe")


@dataclass(frozen=True, slots=True)
class DataWait:
    """The rank that waits longest for data in the newest training: seconds of its usual step."""

    rank: int
    data_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """What a rank sends in the usual step of the newest training, and in how many collectives."""

    nbytes: float
    collectives: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LinkProbe(Sequence[PairLink]):
    """The measured links, one a pair. Prints as a table, with a verdict below.

    Attributes:
        links: Of the pairs.
        all_reduce: The line through all_reduces of all ranks, by the bytes of their tensors; None
            on one rank.
        rates: Floating-point operations a second by rank and dtype, all ranks at once.
        data: Of the newest training, if there is one that waits for data.
        traffic: Likewise.
        backend: "gloo" or "nccl".
    """

    links: tuple[PairLink, ...]
    all_reduce: Fit | None = None
    rates: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    data: DataWait | None = None
    traffic: StepTraffic | None = None
    backend: str = "gloo"

    def __len__(self) -> int:
        return len(self.links)

    def __getitem__(self, index: int) -> PairLink:  # type: ignore[override]
        return self.links[index]

    def __iter__(self) -> Iterator[PairLink]:
        return iter(self.links)

    @property
    def classes(self) -> tuple[LinkClass, ...]:
        """The kinds of links, the fastest first, those inside hosts before those between."""
        return classes(self.links)

    @property
    def ring(self) -> Link | None:
        """What each rank has of the links while all of them send, by their all_reduces."""
        n = len(self.rates)
        if self.all_reduce is None or n < 2:
            return None
        latency_s = self.all_reduce.latency_s / rounds("all_reduce", n, self.backend)
        bandwidth = self.all_reduce.bandwidth * 2 * (n - 1) / n
        return Link(latency_s, bandwidth, "all ranks", "measured by %dist probe")

    def __str__(self) -> str:
        """Return a table of the pairs, and the verdict."""
        parts = [self._table()] if self.links else []
        return "\n".join([*parts, *self.verdict()])

    __repr__ = __str__

    def _table(self) -> str:
        rows = [("ranks", "hosts", "latency", "bandwidth", "")]
        middle = median(link.bandwidth for link in self.links)
        for link in self.links:
            hosts = link.hosts[0] if link.is_inside else " - ".join(link.hosts)
            notes = []
            if link.bandwidth * _FASTER < middle:
                notes.append(f"{link.bandwidth / middle:.2f} x the median")
            if link.sender is not None:
                notes.append(f"when rank {link.sender} sends")
            rows.append(
                (
                    "{} - {}".format(*link.ranks),
                    hosts,
                    f"{figure(link.latency_s * 1e3)} ms",
                    name_rate(link.bandwidth),
                    " ".join(notes),
                )
            )
        return "\n".join(aligned(rows))

    def verdict(self) -> list[str]:
        """Return what was found, in sentences."""
        said = [_of_links(one) for one in self.classes]
        if self.rates:
            said.append(_of_computing(self.rates))
        if self.all_reduce is not None:
            said.append(self._of_all_reduce(self.all_reduce))
        if self.traffic is not None and self.ring is not None:
            said.append(_of_traffic(self.traffic, self.ring, len(self.rates), self.backend))
        if self.data is not None:
            said.append(_of_data(self.data))
        return said

    def _of_all_reduce(self, line: Fit) -> str:
        return (
            f"{name_bytes(_BUCKET)} of gradients take about {_ms(line.time_s(_BUCKET))} to reduce "
            f"on these {len(self.rates)} ranks: {_line(line)}."
        )


def choose_pairs(hosts: Mapping[int, str]) -> list[tuple[int, int]]:
    """Return the pairs to measure: every one of few ranks, else one for each link.

    Args:
        hosts: The host of each rank. Of many ranks, those of one host are measured once, and each
            two hosts by their first ranks.
    """
    everyone = list(combinations(sorted(hosts), 2))
    if len(everyone) <= _MOST_PAIRS:
        return everyone
    by_link: dict[frozenset[str], tuple[int, int]] = {}
    for first, second in everyone:
        by_link.setdefault(frozenset((hosts[first], hosts[second])), (first, second))
    return sorted(by_link.values())


def both_ways(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return each pair twice, the rank that sends first: a link may be slow in one direction."""
    return [ends for first, second in pairs for ends in ((first, second), (second, first))]


def links(
    pairs: Sequence[tuple[int, int]],
    hosts: Mapping[int, str],
    measured: Mapping[int, Sequence[Points]],
) -> tuple[PairLink, ...]:
    """Return the link of each pair, in its slower direction.

    Args:
        pairs: As `choose_pairs` returns them.
        hosts: The host of each rank.
        measured: By the rank that sent, in the order of `both_ways(pairs)`.
    """
    left = {rank: iter(values) for rank, values in measured.items()}
    lines: dict[tuple[int, int], tuple[Fit, Points]] = {}
    for ends in both_ways(pairs):
        timed = tuple((size, seconds) for size, seconds in next(left[ends[0]]))
        lines[ends] = fit(timed), timed
    found = []
    for first, second in pairs:
        ways = ((first, second), (second, first))
        slow, fast = sorted(ways, key=lambda way: lines[way][0].bandwidth)
        line, points = lines[slow]
        is_one_way = line.bandwidth * _FASTER < lines[fast][0].bandwidth
        at = (hosts[first], hosts[second])
        slower = slow[0] if is_one_way else None
        found.append(PairLink((first, second), at, line.latency_s, line.bandwidth, points, slower))
    return tuple(found)


def classes(pairs: Sequence[PairLink]) -> tuple[LinkClass, ...]:
    """Return the kinds of links: by their place, then where bandwidth or latency has a gap."""
    found = []
    for place, is_inside in (("inside a host", True), ("between hosts", False)):
        here = [pair for pair in pairs if pair.is_inside is is_inside and pair.points]
        for i, by_bandwidth in enumerate(_apart(here, "bandwidth", _FASTER)):
            for k, alike in enumerate(reversed(_apart(by_bandwidth, "latency_s", _SOONER))):
                more = [word for word, is_said in (("slower", i), ("later", k)) if is_said]
                points = [point for pair in alike for point in pair.points]
                found.append(LinkClass(", ".join([place, *more]), tuple(alike), fit(points)))
    return tuple(found)


def _apart(pairs: Sequence[PairLink], value: str, ratio: float) -> list[list[PairLink]]:
    """Return the pairs in groups, largest values first, cut where the next is `ratio` smaller."""
    groups: list[list[PairLink]] = []
    for pair in sorted(pairs, key=lambda pair: -float(getattr(pair, value))):
        if groups and getattr(pair, value) * ratio > getattr(groups[-1][-1], value):
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return [sorted(group, key=lambda pair: pair.ranks) for group in groups]


def of_newest(
    trained: TrainedCell | None, world_size: int
) -> tuple[DataWait | None, StepTraffic | None]:
    """Return how the newest training waits for data, and what it sends; None where not known.

    Of one on another number of ranks the traffic would be another.
    """
    if trained is None:
        return None, None
    waits = _medians(trained, "data_s")
    steps = _medians(trained, "step_s")
    known = waits.keys() & steps.keys()
    rank = max(known, key=lambda rank: waits[rank] / max(steps[rank], 1e-9), default=None)
    data = None if rank is None or not waits[rank] else DataWait(rank, waits[rank], steps[rank])
    figures = trained.figures
    if figures is None or not figures.bytes or figures.world_size != world_size:
        return data, None
    if not figures.kinds[0].keys() <= COLLECTIVES.keys():  # numbers alone
        return data, None
    return data, StepTraffic(figures.bytes, figures.kinds[0])


def _medians(trained: TrainedCell, key: str) -> dict[int, float]:
    series = trained.telemetry.series(key)
    return {rank: float(median(one.values[: one.n])) for rank, one in series.items() if one.n}


def _of_links(one: LinkClass) -> str:
    pairs = f"{counted(len(one.pairs), 'pair')}"
    if one.name.endswith(("slower", "later")):
        pairs = ", ".join("{} - {}".format(*pair.ranks) for pair in one.pairs[:6])
        pairs += ", ..." if len(one.pairs) > 6 else ""
        senders = [pair.sender for pair in one.pairs if pair.sender is not None]
        common = set.intersection(*(set(pair.ranks) for pair in one.pairs))
        if len(senders) == 1 and None not in senders:
            pairs += (
                f": when {name_ranks(sender for sender in senders if sender is not None)} sends"
            )
        elif len(one.pairs) > 1 and common:
            pairs += f": {name_ranks(common)} in each"
    return f"Links {one.name} ({pairs}): {_line(one.fit)}."


def _line(line: Fit) -> str:
    off, worst = (f"{100 * share:.0f} %" for share in (line.off, line.worst))
    return (
        f"{_ms(line.latency_s)} + {name_rate(line.bandwidth)} (half of the messages are within "
        f"{off}, the worst {worst}, of {name_bytes(line.worst_at)})"
    )


def _of_computing(rates: Mapping[int, Mapping[str, float]]) -> str:
    """Return each dtype's median rate, and who is slower than that."""
    middle = median_rates(rates)
    named = ", ".join(f"{name_flops(rate)} in {dtype}" for dtype, rate in middle.items())
    said = [f"Ranks multiply matrices at {named} each, all at once."]
    for rank, of_rank in sorted(rates.items()):
        share = min(of_rank[dtype] / middle[dtype] for dtype in middle)
        if share < _SLOW:
            said.append(f"Rank {rank} computes at {share:.2g} x the median.")
    return " ".join(said)


def _of_traffic(sent: StepTraffic, ring: Link, n: int, backend: str) -> str:
    waits = sum(count * rounds(kind, n, backend) for kind, count in sent.collectives.items())
    seconds = waits * ring.latency_s + sent.nbytes / ring.bandwidth
    count = counted(sum(sent.collectives.values()), "collective")
    return (
        f"A step of the newest training sends {name_bytes(sent.nbytes)} a rank in {count}: "
        f"predicted {_ms(seconds)}, none of it hidden, all of it among all ranks."
    )


def _of_data(wait: DataWait) -> str:
    share = wait.data_s / max(wait.step_s, 1e-9)
    said = (
        f"Of the newest training's steps rank {wait.rank} waits longest for data: "
        f"{_ms(wait.data_s)} of {_ms(wait.step_s)}"
    )
    return f"{said}. Do: loader.probe()" if share > _WAITS else f"{said}, the loader keeps up."


def _ms(seconds: float) -> str:
    return f"{figure(seconds * 1e3)} ms"
