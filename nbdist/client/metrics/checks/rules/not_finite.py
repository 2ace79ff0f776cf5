"""A rule on a loss that is no number any more.

Of a single step that says little: it is said once the next one's is none either, or the cell ends.
Ranks tell of their steps in batches, one rank sooner than another. So a step is judged when all
ranks have told of it, whichever order they did it in: one sentence names all that it befell.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from nbdist.client.metrics.checks.planting import both, rows, training
from nbdist.client.metrics.checks.rule import Rule, WatchedCell, Watcher
from nbdist.shared.text import name_ranks
from nbdist.shared.wire import Record


@dataclass(frozen=True, slots=True)
class LostLosses:
    """Since which step the loss of a rank is no number, and what it was then; of so many ranks.

    Of those that `have_recovered`, it is known to be one again.
    """

    since: Mapping[int, tuple[int, float]]
    ranks: int
    have_recovered: bool = False


class Losses(Watcher[LostLosses]):
    """One cell's losses, as backward saw them."""

    kinds = frozenset(("step",))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""
        self._ranks = frozenset(cell.ranks)
        self._newest: dict[int, int] = {}  # each rank's newest step
        self._lost: set[int] = set()  # ranks, at their newest steps
        # Where a rank's loss became none, or one again: of steps that not all have told of.
        self._changes: list[tuple[int, int, float]] = []  # step, rank, loss
        self._since: dict[int, tuple[int, float]] = {}  # as of the steps that all have told of

    def take(self, record: Record) -> LostLosses | None:
        """Take in a step; return the losses that stay no number, once all ranks are heard."""
        rank, loss = record.rank, record.values.get("loss")
        if record.step <= self._newest.get(rank, 0):
            return None  # what fills a gap is older
        self._newest[rank] = record.step
        if loss is not None and math.isfinite(loss) == (rank in self._lost):
            self._lost ^= {rank}
            heappush(self._changes, (record.step, rank, loss))
        if not (self._changes or self._since) or not self._newest.keys() >= self._ranks:
            return None
        return self._judged(min(self._newest.values()))

    def end(self) -> LostLosses | None:
        """Return the losses that stay no number, or are none now."""
        found = self._judged(max(self._newest.values(), default=0))
        return found or self._found() if self._since else None

    def _judged(self, told: int) -> LostLosses | None:
        """Go on to a step; return the losses that are no number at two steps in a row."""
        while True:
            upcoming = self._changes[0][0] if self._changes else told + 1
            # Nothing has changed until then.
            first = min((step for step, _ in self._since.values()), default=told)
            if first < min(upcoming - 1, told):
                return self._found()
            if upcoming > told:
                return None
            while self._changes and self._changes[0][0] == upcoming:
                step, rank, loss = heappop(self._changes)
                if math.isfinite(loss):
                    self._since.pop(rank, None)
                else:
                    self._since[rank] = (step, loss)

    def _found(self) -> LostLosses:
        have_recovered = not self._since.keys() <= self._lost
        return LostLosses(dict(self._since), len(self._ranks), have_recovered)


def _is_lost(lost: LostLosses) -> str:
    first, value = min(lost.since.values(), key=lambda since: since[0])
    word = "NaN" if math.isnan(value) else "infinite"
    begun = [rank for rank, (step, _) in lost.since.items() if step == first]
    on = "all ranks" if len(begun) == lost.ranks > 1 else name_ranks(sorted(begun))
    be, since = ("was", "at") if lost.have_recovered else ("is", "since")
    said = f"The loss {be} {word} on {on} {since} step {first:,}"
    # It has come from those where it began, with the gradients.
    later = {rank: step for rank, (step, _) in lost.since.items() if step > first}
    if later:
        said += f", and on {name_ranks(sorted(later))} {since} step {min(later.values()):,}"
    return f"{said}."


LOSS_NOT_FINITE = Rule(
    "loss-not-finite",
    "the loss is no number any more",
    Losses,
    _is_lost,
    remedy="Look at what that rank computes at that step: a logarithm, a root, an overflow.",
    planted=both("step", (41,), loss=2.0)
    + rows("step", {"loss": 1.9}, {"loss": math.nan}, (42, 43)),
    sound=both("step", (41, 42, 43), loss=2.0),
    example=training(backward="model(x).log().mean().backward()"),
    mended=training(backward="model(x).exp().log().mean().backward()"),
    sources=(
        "https://github.com/ecmwf/WeatherGenerator/issues/2724",
        "https://github.com/pytorch/torchtitan/pull/3863",
    ),
)
