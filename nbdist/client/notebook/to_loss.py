"""`%dist runs --to-loss`: what recorded runs would take to come to a loss, and what that costs."""

import math
from collections.abc import Sequence
from statistics import fmean

from nbdist.client.advice.advise import price_table
from nbdist.client.tracking.past.compare import Entry
from nbdist.shared.errors import UsageError
from nbdist.shared.text import counted, figure
from nbdist.study.prices import Price, steps_to_loss

_MEAN_OF = 10  # points of a curve: one batch alone may be an easy one


def to_loss(
    runs: Sequence[Entry], loss: str, device: str = "", file: str | None = None, *more: str
) -> str:
    """Return in lines what runs would take: steps, hours, the price, and what that rests on.

    Args:
        runs: As recorded.
        loss: To come to.
        device: The section of the price table; "" for no price.
        file: A price table in TOML; None for list prices.
        more: Words that mean nothing.

    Raises:
        UsageError: A word is wrong, a run has no losses that fall, or the table no such device.
    """
    try:
        target = float(loss)
    except ValueError:
        raise UsageError(f"--to-loss takes a loss first, such as 2.1, not {loss!r}.") from None
    prices = price_table(file)
    if more or (device and device not in prices):
        known = f"known devices are {', '.join(prices)}"
        raise UsageError("--to-loss takes a loss, a device with a price, and a file.", why=known)
    return "\n".join(line for run in runs for line in _lines(run, target, prices.get(device), file))


def _lines(run: Entry, target: float, price: Price | None, file: str | None) -> list[str]:
    points = [(step, mean) for step, mean, *_ in run.curve if mean is not None]
    steps, losses = [step for step, _ in points], [mean for _, mean in points]
    later = enumerate(steps[_MEAN_OF - 1 :])
    means = ((step, fmean(losses[at : at + _MEAN_OF])) for at, step in later)
    basis = f"Recorded: the mean of {_MEAN_OF} points of its curve first came to it there."
    band = [float(step) for step, mean in means if mean <= target][:1]
    if not band:
        found = steps_to_loss(losses, target, steps)
        band = [found.steps, found.earliest, found.latest]
        basis = (
            "Predicted, by a power law through the second half of its losses, off by "
            f"{figure(found.error)} in the mean: in brackets those that fit at most twice as "
            "badly. A learning rate that changes later moves it more."
        )
    if all(map(math.isinf, band)):
        ends = f"{run.name} comes to no loss of {target:g} on the curve of its {run.steps} steps."
        return [ends, basis]
    said = [f"Steps of {run.name} to a loss of {target:g}: {_band(band)}; {run.steps} are made."]
    if run.step_ms is not None:
        hours, ranks = [run.step_ms * steps / 3.6e6 for steps in band], int(run.facts["ranks"])
        said.append(f"Hours of all of them on its {counted(ranks, 'rank')}: {_band(hours)}.")
        if price is not None:
            costs = [price.of(3600 * time, ranks) for time in hours]
            said.append(f"Price in {price.currency}: {_band(costs)}")
            if run.throughput is not None:
                each = price.of(1000 / run.throughput.value, ranks)
                said[-1] += f", {figure(each)} per 1k samples"
            said[-1] += f", at {figure(price.per_hour)} a device and hour ({price.source or file})"
            said[-1] += f", steps as long as on {run.facts.get('devices', 'its devices')}."
    return [*said, basis]


def _band(values: Sequence[float]) -> str:
    first, *rest = ("never" if math.isinf(one) else figure(one) for one in values)
    return f"{first} ({' to '.join(rest)})" if rest else first
