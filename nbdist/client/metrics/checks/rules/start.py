"""Rules on the weights that ranks begin with."""

from nbdist.client.metrics.checks.planting import both, rows, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import ENOUGH, Seen, Uses, where_told


@where_told("weights")
def _trains_alone(seen: Seen) -> str:
    """Every rank trains a plain model of its own, on its part of the samples or from one start.

    Ranks that begin apart and see all samples may be an ensemble; with other rates, a search.
    """
    first = {} if seen.first is None else seen.first.of("weights")
    now = seen.last.of("weights")
    is_apart = len(now) == len(seen.last.by_rank) > 1 and len(set(now.values())) > 1
    began_alike = len(first) == len(now) and len(set(first.values())) == 1
    shares = all(seen.last.of("shared").values())
    is_one_recipe = len(seen.rates) <= 1 and seen.collectives == 0
    if not (is_apart and is_one_recipe and (began_alike or shares) and seen.last.number >= ENOUGH):
        return ""
    how = "they started equal, and differ" if began_alike else "each learns from its own samples"
    return (
        f"Each rank trains a model of its own: {how}, and in {seen.last.number} steps nothing has "
        'averaged gradients. nbdist.parallelize(model, "ddp") before the optimizer trains one '
        "model on all ranks."
    )


MODEL_PER_RANK = Rule(
    "model-per-rank",
    "each rank trains a plain model of its own",
    Uses,
    _trains_alone,
    remedy="Spread the model before its optimizer is made.",
    planted=both("use", (0,), weights=1)
    + both("step", (5,), collectives=0)
    + rows("use", {"weights": 2}, {"weights": 3}, (5,)),
    sound=both("use", (0,), weights=1)
    + both("step", (5,), collectives=0)
    + both("use", (5,), weights=2),
    example=training("model = torch.nn.Linear(4, 4)"),
    mended=training(),
    sources=(
        "https://github.com/kohya-ss/sd-scripts/issues/924",
        "https://github.com/pytorch/pytorch/issues/104336",
    ),
)


@where_told("by_hand")
def _began_apart(seen: Seen) -> str:
    first = {} if seen.first is None else seen.first.of("weights")
    by_hand = [step for step in seen.steps if any(step.of("by_hand").values())]
    if len(set(first.values())) < 2 or len(by_hand) < 2 or seen.last.parts:
        return ""
    return (
        "Ranks average gradients of models that began with different weights, so none of them is "
        'trained. nbdist.parallelize(model, "ddp") gives all ranks rank 0\'s; or build the model '
        "after torch.manual_seed with the same seed."
    )


_MODEL = "model = torch.nn.Linear(4, 4)"
_OWN = "torch.manual_seed(rank)\n"
_BY_HAND = """model(x).square().mean().backward()
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= world_size"""

UNEQUAL_START = Rule(
    "unequal-start",
    "the loop averages gradients of models that began with different weights",
    Uses,
    _began_apart,
    remedy="Build the model from one seed, or let nbdist.parallelize send rank 0's weights.",
    planted=rows("use", {"weights": 1}, {"weights": 2}, (0,)) + both("use", (1, 2), by_hand=4),
    sound=both("use", (0,), weights=1) + both("use", (1, 2), by_hand=4),
    example=training(_OWN + _MODEL, backward=_BY_HAND),
    mended=training(_MODEL, backward=_BY_HAND),
    sources=(
        "https://github.com/pytorch/torchtitan/issues/166",
        "https://github.com/pytorch/pytorch/issues/75870",
    ),
)


def _shards_began_apart(seen: Seen) -> str:
    first = {} if seen.first is None else seen.first.of("weights")
    groups = {} if seen.first is None else seen.first.of("shared_by")
    weights: dict[float, set[float]] = {}
    for rank, group in groups.items():
        weights.setdefault(group, set()).add(first.get(rank, -1.0))  # not known on this rank
    if not any(len(found) > 1 and -1.0 not in found for found in weights.values()):
        return ""
    return (
        "fully_shard cut a model that began with different weights on each rank: its shards do "
        "not form one model. Build it after torch.manual_seed with the "
        'same seed, or let nbdist.parallelize(model, "zero3") give all ranks rank 0\'s.'
    )


_SHARD = f"from torch.distributed.fsdp import fully_shard\n{_MODEL}\nfully_shard(model)"

UNEQUAL_SHARDS = Rule(
    "unequal-shards",
    "ranks have cut weights of their own into the shards of one model",
    Uses,
    _shards_began_apart,
    remedy="Build the model from one seed, or let nbdist.parallelize send rank 0's weights.",
    planted=rows("use", {"weights": 1, "shared_by": 0}, {"weights": 2, "shared_by": 0}, (0,))
    + both("use", (1,), parts=2),
    sound=both("use", (0,), weights=1, shared_by=0) + both("use", (1,), parts=2),
    example=training(_OWN + _SHARD),
    mended=training(_SHARD),
    sources=(
        "https://github.com/pytorch/torchtitan/issues/166",
        "https://github.com/pytorch/torchtitan/issues/1777",
    ),
)
