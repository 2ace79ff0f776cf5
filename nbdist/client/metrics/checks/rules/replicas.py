"""A rule on a DistributedSampler that shares samples out among more or fewer ranks than there are.

It is decided at a cell's end: whoever takes several replicas' samples on each rank, one after the
other, leaves none out.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.client.metrics.checks.planting import rows, training
from nbdist.client.metrics.checks.rule import Rule, WatchedCell, Watcher
from nbdist.shared.wire import Record

_FEWEST = 2  # reports of each rank


@dataclass(frozen=True, slots=True)
class Shares:
    """What DistributedSamplers have given each rank: (how many replicas, which), each once.

    `parts` are into how many parts of a batch the model of a rank is trained by, and which part a
    rank has.
    """

    given: Mapping[int, frozenset[tuple[int, int]]]
    parts: Mapping[int, frozenset[tuple[int, int]]]


class Sharing(Watcher[Shares]):
    """One cell's samplers."""

    kinds = frozenset(("use",))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""
        self._ranks = frozenset(cell.ranks)
        self._reports: defaultdict[int, int] = defaultdict(int)
        self._given: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        self._parts: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)

    def take(self, record: Record) -> None:
        """Take in what a rank is given."""
        values, rank = record.values, record.rank
        if not record.step:
            return
        self._parts[rank].add((int(values.get("parts", 0)), int(values.get("part", 0))))
        # Without one, samples of this rank come from elsewhere, too.
        share = (int(values.get("replicas", 0)), int(values.get("replica", 0)))
        self._given[rank].add(share)
        self._reports[rank] += 1

    def end(self) -> Shares | None:
        """Return what each rank was given, where all have told it more than once."""
        if any(self._reports[rank] < _FEWEST for rank in self._ranks):
            return None
        return Shares(
            {rank: frozenset(self._given[rank]) for rank in sorted(self._ranks)},
            {rank: frozenset(self._parts[rank]) for rank in sorted(self._ranks)},
        )


def _is_cut_otherwise(shares: Shares) -> str:
    known = [*shares.given.values(), *shares.parts.values()]
    if any(len(one) > 1 for one in known):
        return ""
    given = {rank: next(iter(one)) for rank, one in shares.given.items()}
    place = {rank: next(iter(one)) for rank, one in shares.parts.items()}
    all_replicas, all_parts = {n for n, _ in given.values()}, {n for n, _ in place.values()}
    # Ranks with one part are one reader; that they get the same samples is another rule's.
    by_part = {(place[rank][1], given[rank][1]) for rank in given}
    if len(all_replicas) > 1 or len(all_parts) > 1 or len(by_part) != len({p for p, _ in by_part}):
        return ""
    (replicas,), (parts,) = all_replicas, all_parts
    if replicas in (0, parts) or parts < 2 or len(by_part) != parts:
        return ""
    taken = len({replica for _, replica in by_part})
    if taken == 1:
        return ""  # all learn from the same samples, as another rule says
    times = f"{parts / replicas:g}"
    what = (
        f"the samples of {replicas - taken} of them are never trained"
        if taken < replicas
        else f"each sample is trained {times} times an epoch"
    )
    return (
        f"A DistributedSampler shares samples out among {replicas} replicas, and the model is "
        f"trained by {parts} parts of each batch: {what}. Leave num_replicas and rank out, and "
        "make the sampler anew once the number of ranks has changed; with a layout, "
        "layout.shape.data_part(rank) gives rank and num_replicas."
    )


_SAMPLER = """torch.utils.data.TensorDataset(torch.randn(64, 4))
sampler = torch.utils.data.DistributedSampler(data{})"""
_LOADER = "torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)"
_HARD_CODED = ", num_replicas=4, rank=rank"
_ZERO, _ONE = {"part": 0, "parts": 2, "replica": 0}, {"part": 1, "parts": 2, "replica": 1}

OTHER_REPLICAS = Rule(
    "other-replicas",
    "a DistributedSampler was made for another number of ranks than train",
    Sharing,
    _is_cut_otherwise,
    remedy="Leave num_replicas and rank out: a DistributedSampler asks for both when it is made.",
    planted=rows("use", _ZERO | {"replicas": 4}, _ONE | {"replicas": 4}, (1, 2)),
    sound=rows("use", _ZERO | {"replicas": 2}, _ONE | {"replicas": 2}, (1, 2)),
    example=training(data=_SAMPLER.format(_HARD_CODED), loader=_LOADER),
    mended=training(data=_SAMPLER.format(""), loader=_LOADER),
    sources=(
        "https://docs.pytorch.org/docs/stable/data.html",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/19961",
    ),
)
