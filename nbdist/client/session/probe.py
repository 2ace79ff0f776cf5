"""`%dist probe`: which pairs of ranks to measure, and what to say of their links. Pure."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from nbdist.shared.text import aligned, figure, name_rate

_MOST_PAIRS = 28  # all of eight ranks
_SLOW = 0.5  # of the median bandwidth


@dataclass(frozen=True, slots=True)
class Link:
    """Between two ranks: seconds that a short message takes, and bytes a second of a long one."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_s: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class LinkProbe(Sequence[Link]):
    """The measured links. Prints as a table."""

    links: tuple[Link, ...]

    def __len__(self) -> int:
        return len(self.links)

    def __getitem__(self, index: int) -> Link:  # type: ignore[override]
        return self.links[index]

    def __iter__(self) -> Iterator[Link]:
        return iter(self.links)

    def __str__(self) -> str:
        rows = [("ranks", "hosts", "latency", "bandwidth", "")]
        middle = statistics.median(link.bandwidth for link in self.links)
        for link in self.links:
            hosts = link.hosts[0] if len(set(link.hosts)) == 1 else " - ".join(link.hosts)
            slow = f"{link.bandwidth / middle:.2f} x the median"
            rows.append(
                (
                    "{} - {}".format(*link.ranks),
                    hosts,
                    f"{figure(link.latency_s * 1e3)} ms",
                    name_rate(link.bandwidth),
                    slow if link.bandwidth < _SLOW * middle else "",
                )
            )
        return "\n".join(aligned(rows))

    def __repr__(self) -> str:
        return str(self)


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


def links(
    pairs: Sequence[tuple[int, int]],
    hosts: Mapping[int, str],
    measured: Mapping[int, Sequence[Sequence[float]]],
) -> LinkProbe:
    """Return what each pair's first rank has measured, in the order of the pairs."""
    left = {rank: iter(values) for rank, values in measured.items()}
    return LinkProbe(
        tuple(
            Link((first, second), (hosts[first], hosts[second]), *next(left[first]))
            for first, second in pairs
        )
    )
