"""A rule on schedules of the learning rate that step too often, or against each other."""

from nbdist.client.metrics.checks.planting import both, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Uses, where_told

_FEWEST = 3  # reports: a step that a scaler leaves out lets a schedule step twice, once


@where_told("turns", "overwritten")
def _steps_too_often(seen: Seen) -> str:
    told = [step for step in seen.steps if step.of("overwritten")][-_FEWEST:]
    if len(told) < _FEWEST:
        return ""
    since, until = told[0].number, told[-1].number
    if all(all(step.of("overwritten").values()) for step in told):
        return (
            "Two schedules step the learning rate of one optimizer, and one of them (a LambdaLR, "
            "OneCycleLR, CyclicLR or CosineAnnealingWarmRestarts) computes it from the initial "
            f"rate alone: what the other makes of it is lost, as in steps {since:,} to {until:,}. "
            "Let one follow the other by SequentialLR, or write both into one LambdaLR."
        )
    turns = {turns for step in told for turns in step.of("turns").values()}
    is_whole = all(step.of("turns").keys() == step.by_rank.keys() for step in told)
    if not is_whole or len(turns) > 1 or min(turns) < 2:
        return ""
    times = f"{turns.pop():g}"
    return (
        f"The schedule of the learning rate steps {times} times for each step of its optimizer, as "
        f"in steps {since:,} to {until:,}: the rate runs through it {times} times as fast. Call "
        "scheduler.step() in one place, once after optimizer.step(): not in the loop and in a "
        "callback, a trainer or a function that the loop calls."
    )


_LOOP = training(data="torch.utils.data.TensorDataset(torch.randn(256, 4))").replace(
    "for (x,)", "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)\nfor (x,)"
)
_STEP = "optimizer.step()\n    schedule.step()"

RATE_STEPPED_TWICE = Rule(
    "rate-stepped-twice",
    "a schedule of the learning rate steps twice for each step, or two overwrite each other's",
    Uses,
    _steps_too_often,
    remedy="Step one schedule, once after each step of the optimizer.",
    planted=both("use", (5, 10, 20), turns=2, overwritten=0),
    sound=both("use", (5, 10, 20), turns=1, overwritten=0),
    example=_LOOP.replace("optimizer.step()", _STEP) + "    schedule.step()\n",
    mended=_LOOP.replace("optimizer.step()", _STEP),
    sources=(
        "https://github.com/pytorch/vision/issues/1261",
        "https://github.com/pytorch/pytorch/issues/82859",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/4902",
    ),
)
