"""A rule on losses that are means over a mask, of which ranks keep unequal numbers.

Ranks' gradients are averaged as if all had kept equally many, so that a token counts more where
there are fewer. What ranks tell (`engine/checks/means`) is what one element counts, with all that
the loss is multiplied with: a loss that is weighed by hand or by `layout.step` has one number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.client.metrics.checks.planting import rows, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Step, Uses, where_told
from nbdist.shared.text import figure

_FEWEST = 3  # steps: of fewer, chance may have dealt long samples to one rank
_TIMES = 1.5  # what one element counts, where it counts most, on the geometric mean over steps


def _each(step: Step) -> Mapping[int, float] | None:
    """Return what an element counts, by rank, a rank for each part; None where that is not known.

    Of batches with unequal numbers of samples the loader tells.
    """
    each, part, by_part = step.of("each"), step.of("part"), dict[float, float]()
    if not each.keys() == part.keys() == step.by_rank.keys():
        return None
    if len(set(step.samples.values())) > 1:
        return None
    found: dict[int, float] = {}
    for rank in sorted(part):
        known = by_part.get(part[rank])
        if known is None:
            by_part[part[rank]] = found[rank] = each[rank]
        elif not math.isclose(known, each[rank], rel_tol=1e-3):
            return None  # as where ranks have a part of each sequence
    groups = step.of("shared_by")
    is_one = not groups or (len(groups) == len(step.by_rank) and len(set(groups.values())) == 1)
    return found if is_one and len(found) == step.parts > 1 else None


@dataclass(frozen=True, slots=True)
class _Apart:
    """The ranks whose elements count most and least in a step, and over how many each means."""

    step: int
    most: int
    least: int
    counts: tuple[float, float]
    times: float

    def by_counts(self) -> float:
        """Return how far apart they are by their counts: no more than what an element counts."""
        return min(self.times, self.counts[1] / self.counts[0])


def _apart_in(step: Step) -> _Apart | None:
    if not (each := _each(step)):
        return None
    most, least = max(each, key=lambda rank: each[rank]), min(each, key=lambda rank: each[rank])
    counted = step.of("counted")
    return _Apart(
        step.number, most, least, (counted[most], counted[least]), each[most] / each[least]
    )


@where_told("counted")
def _counts_unequally(seen: Seen) -> str:
    found = [apart for step in seen.steps if (apart := _apart_in(step))]
    far = sum(math.log(apart.by_counts()) for apart in found)
    if len(found) < _FEWEST or far < len(found) * math.log(_TIMES):
        return ""
    farthest = max(found[-_FEWEST:], key=_Apart.by_counts)
    fewer, more = (f"{int(count):,}" for count in farthest.counts)
    return (
        f"The loss is a mean over {fewer} elements on rank {farthest.most} and {more} on rank "
        f"{farthest.least} at step {farthest.step:,}, and ranks' gradients are averaged as if both "
        f"were equally many: an element of rank {farthest.most} counts {figure(farthest.times)} "
        f"times as much as one of rank {farthest.least}. layout.step(x, y, loss_fn, "
        "weight=(y != -100)) weighs them by what a mask keeps; in a plain loop divide the sum by "
        "the mean of all ranks' counts."
    )


_LOSS = "loss = (model(x).square() * keep).sum() / kept\nloss.backward()"
_OWN = "keep = (torch.arange(4) <= 3 * rank).float().expand(4, 4)\nkept = keep.sum()\n"
_OF_ALL = "dist.all_reduce(kept)\nkept = kept / world_size\n"
_DATA = "torch.utils.data.TensorDataset(torch.randn(128, 4))"
_STEPS = {"parts": 2}
_ONE, _OTHER = {"part": 0, "counted": 40}, {"part": 1, "counted": 10}

UNEQUAL_MEANS = Rule(
    "unequal-means",
    "a loss is a mean over what a mask keeps, and ranks keep unequal numbers",
    Uses,
    _counts_unequally,
    remedy="Divide by the mean of all ranks' counts, or have layout.step weigh by them: weight=.",
    planted=rows(
        "use", _STEPS | _ONE | {"each": 1 / 40}, _STEPS | _OTHER | {"each": 1 / 10}, (2, 5, 10)
    ),
    sound=rows(
        "use", _STEPS | _ONE | {"each": 1 / 25}, _STEPS | _OTHER | {"each": 1 / 25}, (2, 5, 10)
    ),
    example=training(data=_DATA, backward=_OWN + _LOSS),
    mended=training(data=_DATA, backward=_OWN + _OF_ALL + _LOSS),
    sources=(
        "https://github.com/pytorch/torchtitan/issues/1842",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/2562",
        "https://github.com/vllm-project/speculators/pull/942",
    ),
)
