"""A rule on ranks that cut their batches from different orders: samples are given twice, or not."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.client.metrics.checks.planting import both, rows, training
from nbdist.client.metrics.checks.rule import Rule, WatchedCell, Watcher
from nbdist.client.metrics.checks.rules.starving import LoaderFacts
from nbdist.shared.wire import Record

_MOST_OPEN = 256  # loops that not all ranks have begun

_Line = tuple[int, int]  # prompt and line of the cell that has made the loader


@dataclass(frozen=True, slots=True)
class BegunLoop:
    """A loop over an `nbdist.loader`, and a number of what decides its batches, by rank."""

    loader: LoaderFacts
    orders: Mapping[int, float]


class BegunLoops(Watcher[BegunLoop]):
    """Finds the loops that all ranks have begun: of each line of a cell in turn."""

    kinds = frozenset(("loader",))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""
        self._ranks = frozenset(cell.ranks)
        self._begun: Counter[tuple[int, _Line]] = Counter()  # loops, by rank and line
        self._open: defaultdict[tuple[_Line, int], dict[int, float]] = defaultdict(dict)

    def take(self, record: Record) -> BegunLoop | None:
        """Take in that a loop begins; return it once it has on all ranks."""
        if "order" not in record.values:
            return None
        line = int(record.values["prompt"]), int(record.values["line"])
        self._begun[record.rank, line] += 1
        loop = line, self._begun[record.rank, line]
        orders = self._open[loop]
        orders[record.rank] = record.values["order"]
        if orders.keys() != self._ranks:
            if len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
            return None
        del self._open[loop]
        return BegunLoop(LoaderFacts(*line), orders)


def _differs(loop: BegunLoop) -> str:
    if len(set(loop.orders.values())) == 1:
        return ""
    name = loop.loader.name
    return (
        f"{name[0].upper()}{name[1:]} is another one on each rank: its seed, shuffle, "
        "global_batch, drop_last or data differ, so samples are given twice or never. "
        "Create it with the same arguments on all ranks."
    )


_BEGUN = {"loader": 1, "prompt": 7, "line": 4, "workers": 0, "pinned": 0} | {
    "persistent": 0,
    "cores": 1,
}

UNEQUAL_LOADERS = Rule(
    "unequal-loaders",
    "an nbdist.loader was made with other arguments on some ranks",
    BegunLoops,
    _differs,
    remedy="Make the loader with the same arguments and data on all ranks.",
    planted=rows("loader", _BEGUN | {"order": 5}, _BEGUN | {"order": 6}, (0,)),
    sound=both("loader", (0,), order=5, **_BEGUN),
    example=training(loader="nbdist.loader(data, global_batch=8, seed=rank)"),
    mended=training(),
    sources=(
        "https://github.com/huggingface/accelerate/issues/2393",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/10947",
    ),
)
