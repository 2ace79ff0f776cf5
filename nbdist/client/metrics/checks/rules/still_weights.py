"""A rule on weights of low precision whose updates are rounded away.

A rate that rises to its peak or falls from it says nothing: its small updates are meant.
"""

from nbdist.client.metrics.checks.planting import DDP, both, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Step, Uses, where_told

_FROM = 10  # the step from which "never" is meant
_STILL = 0.9  # of the sampled weights
_FEWEST = 32  # sampled weights of all ranks


@where_told("sampled")
def _never_move(seen: Seen) -> str:
    told = [step for step in seen.steps if step.number >= _FROM and step.of("sampled")][-2:]
    if len(told) < 2 or not all(map(_stands_still, told)):
        return ""
    before, now = (max(step.of("rate").values()) for step in told)
    if now > 1.01 * before:
        return ""
    sampled, still = (int(sum(told[-1].of(name).values())) for name in ("sampled", "still"))
    return (
        f"Of {sampled:,} sampled weights of the largest parameters {still:,} are, bit for bit, "
        f"what they were at step 1, {told[-1].number - 1:,} steps later, with gradients and a "
        f"learning rate of {now:g}: they are in bf16 or fp16, and an update that is so much "
        "smaller than the weight is rounded away. Keep the weights in float32 and compute in "
        "bf16: no model.to(torch.bfloat16), and nbdist.parallelize(model, layout, "
        'nbdist.Precision("bf16")) with the layout that it has, or torch.autocast.'
    )


def _stands_still(step: Step) -> bool:
    sampled, still = (sum(step.of(name).values()) for name in ("sampled", "still"))
    rates, peaks = step.of("rate"), step.of("peak")
    is_near_peak = all(rates[rank] > 0 and 2 * rates[rank] >= peaks[rank] for rank in rates)
    return is_near_peak and sampled >= _FEWEST and still >= _STILL * sampled


_DATA = "torch.utils.data.TensorDataset(torch.randn(256, 8{}))"
_EXAMPLE = training(
    DDP.replace("4, 4", "8, 8, dtype=torch.bfloat16"),
    data=_DATA.format(", dtype=torch.bfloat16"),
).replace("lr=0.1", "lr=1e-5")
_MENDED = training(
    DDP.replace("4, 4", "8, 8").replace('"ddp"', '"ddp", nbdist.Precision("bf16")'),
    data=_DATA.format(""),
).replace("lr=0.1", "lr=1e-5")
_STEPS = {"sampled": 64, "rate": 1e-5, "peak": 1e-5}

WEIGHTS_NEVER_MOVE = Rule(
    "weights-never-move",
    "weights in bf16 or fp16 stay what they were, for each update is lost in rounding",
    Uses,
    _never_move,
    remedy="Keep weights in float32, and compute in bf16 by a precision of the layout or autocast.",
    planted=both("use", (10, 20), still=62, **_STEPS),
    sound=both("use", (10, 20), still=9, **_STEPS),
    example=_EXAMPLE,
    mended=_MENDED,
    sources=(
        "https://github.com/NVIDIA/Model-Optimizer/pull/2322",
        "https://github.com/NVIDIA-NeMo/Automodel/pull/3444",
        "https://github.com/areal-project/AReaL/pull/1369",
    ),
)
