"""Say how fast each link is, and which one is slow. Pure.

Both ends of a connection tell what they sent and how long they were busy with it ("links" records,
see `wire.Record`); who called knows whom, and the caller's address names the connection at both.
A connection is also busy while the other end, which has room, is late to read: the kernel does not
tell that from a slow path. Who reads late does so now more and now less; a slow path carries about
as much in each sample.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_high

from nbdist.shared.wire import Record

FEWEST_STEPS = 50
FEWEST_SAMPLES = 4
SLOWER = 0.5  # of the other links' rate, in every sample and in all of them
STEADY = 2.0  # the fastest sample of a slow path, against its slowest
SMALL = 0.1  # of the bytes of the busiest link: a rate of less says little
LEAST_BYTES = 64 * 1024  # a step: less tells when ranks got a core, and not how fast the link is
LEAST_BUSY_S = 0.004  # the kernel counts in ticks

Link = tuple[int, int]  # from rank, to rank


@dataclass(slots=True)
class LinkTraffic:
    """What went over a link in some time: bytes, seconds busy, and the last round trip."""

    sent_bytes: float = 0.0
    busy_s: float = 0.0
    rtt_s: float = 0.0

    @property
    def rate(self) -> float:
        """Return bytes per second while there was something to send."""
        return self.sent_bytes / max(self.busy_s, LEAST_BUSY_S)


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Slow links of one rank, the slowest of them: rates in bytes/s, round trips in seconds.

    `lost_s` is what a step would gain at the others' rate.
    """

    rank: int
    link: Link
    rate: float
    others_rate: float
    rtt_s: float
    others_rtt_s: float
    lost_s: float
    since_step: int


@dataclass(frozen=True, slots=True)
class _Sample:
    begin: int  # the step of the sample before
    end: int
    values: Mapping[str, float]


class LinkSamples:
    """The newest samples of all ranks."""

    def __init__(self) -> None:
        self._callers: dict[str, int] = {}
        self._samples: dict[int, deque[_Sample]] = {}

    def add(self, record: Record) -> None:
        """Take in a record of kind "links"."""
        samples = self._samples.setdefault(record.rank, deque(maxlen=32))
        begin = samples[-1].end if samples else record.step
        samples.append(_Sample(begin, record.step, record.values))
        for key in record.values:
            peer, _, caller = key.rpartition(".")[0].partition("@")
            if peer:
                self._callers[caller] = record.rank

    def rates(self) -> dict[int, dict[int, float]]:
        """Return bytes per second, by the rank that sends and the one that receives.

        Links that carry little a step are left out, as by `find`.
        """
        found: dict[int, dict[int, float]] = {}
        for (source, target), total in self._busy(self._recent()).items():
            found.setdefault(source, {})[target] = total.rate
        return found

    def find(self) -> SlowLink | None:
        """Return the rank whose links are slow, None while none is.

        One rank's sending side slows one link of a ring, its whole connection two: it is in all of
        them. Of a single one the sender is named.
        """
        recent = self._recent()
        steps = self._steps()
        if steps < FEWEST_STEPS:
            return None
        totals = self._busy(recent)
        slow = {}
        for link, total in totals.items():
            others = [other.rate for name, other in totals.items() if name != link]
            # The higher one of two: a rank's bad connection may be half of all links.
            limit = SLOWER * median_high(others) if others else 0.0
            if total.rate < limit and _is_steadily_below(recent[link], limit):
                slow[link] = total
        if not slow:
            return None
        worst = min(slow, key=lambda link: slow[link].rate)
        good = [total for link, total in totals.items() if link not in slow]
        if not good:
            return None
        rate = median_high([total.rate for total in good])
        in_all = set.intersection(*(set(link) for link in slow)) if len(slow) > 1 else {worst[0]}
        lost_s = slow[worst].busy_s - slow[worst].sent_bytes / rate
        return SlowLink(
            min(in_all, default=worst[0]),
            worst,
            slow[worst].rate,
            rate,
            slow[worst].rtt_s,
            median_high([total.rtt_s for total in good]),
            lost_s / steps,
            min(samples[-self._count()].begin + 1 for samples in self._samples.values()),
        )

    def _count(self) -> int:
        """Return how many samples make up the window, of each rank."""
        count = FEWEST_SAMPLES
        fewest = min((len(samples) - 1 for samples in self._samples.values()), default=0)
        while count < fewest and self._spanned(count) < FEWEST_STEPS:
            count += 1
        return count

    def _steps(self) -> int:
        return self._spanned(self._count())

    def _spanned(self, count: int) -> int:
        """Return the steps that the last samples of every rank span; 0 while they are too few."""
        if not self._samples or min(map(len, self._samples.values())) <= count:
            return 0
        return min(s[-1].end - s[-count].begin for s in self._samples.values())

    def _busy(self, recent: Mapping[Link, list[LinkTraffic]]) -> dict[Link, LinkTraffic]:
        """Return what went over each link that carries enough a step to tell how fast it is."""
        totals = {link: _sum(samples) for link, samples in recent.items()}
        busiest = max((total.sent_bytes for total in totals.values()), default=0.0)
        least = max(LEAST_BYTES * self._steps(), SMALL * busiest)
        return {link: total for link, total in totals.items() if total.sent_bytes >= least}

    def _recent(self) -> dict[Link, list[LinkTraffic]]:
        found: dict[Link, list[LinkTraffic]] = {}
        count = self._count()
        for rank, samples in self._samples.items():
            for sample in list(samples)[-count:]:
                for link, sent in self._links(rank, sample.values).items():
                    found.setdefault(link, []).append(sent)
        return found

    def _links(self, rank: int, values: Mapping[str, float]) -> dict[Link, LinkTraffic]:
        """Return what one sample tells, the connections of several groups as one link."""
        found: dict[Link, LinkTraffic] = {}
        for key in values:
            name, _, what = key.rpartition(".")
            peer, _, caller = name.partition("@")
            if what != "sent_bytes" or not (peer or caller in self._callers):
                continue
            link = (rank, int(peer) if peer else self._callers[caller])
            sent = found.setdefault(link, LinkTraffic())
            if values[key] >= sent.sent_bytes:
                sent.rtt_s = values[f"{name}.rtt_s"]  # of the busiest
            sent.sent_bytes += values[key]
            sent.busy_s += values[f"{name}.busy_s"]
        return found


def _is_steadily_below(samples: list[LinkTraffic], limit: float) -> bool:
    rates = [sample.rate for sample in samples]
    return max(rates) < min(limit, STEADY * min(rates))


def _sum(samples: list[LinkTraffic]) -> LinkTraffic:
    total = LinkTraffic()
    for sample in samples:
        total.sent_bytes += sample.sent_bytes
        total.busy_s += sample.busy_s
        total.rtt_s = sample.rtt_s
    return total
