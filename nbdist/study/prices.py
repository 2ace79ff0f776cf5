"""What a training costs, and how often it should save: plain numbers.

Prices are a table that people edit, since list prices change: `prices.toml` has a section for each
accelerator, named as in `ACCELERATORS`:

    [h100]
    per_hour = 2.49        # of one device
    currency = "USD"
    source = "our contract, 2026-11"
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nbdist.shared.errors import UsageError
from nbdist.shared.text import figure

_BLOCKS: Final = "Amazon EC2 Capacity Blocks for ML, US East, list price until 2025-01-01"
_ON_DEMAND: Final = "Amazon EC2 on demand, us-east-1"
_EXAMPLE: Final = '[h100]\nper_hour = 2.49\nsource = "our contract"'


@dataclass(frozen=True, slots=True)
class Price:
    """Of one device for an hour.

    Attributes:
        per_hour: In `currency`.
        currency: As it is written behind a number.
        source: Where it comes from, and its date.
    """

    per_hour: float
    currency: str = "USD"
    source: str = ""

    def of(self, seconds: float, devices: int) -> float:
        """Return what devices cost for so long."""
        return self.per_hour * devices * seconds / 3600

    def words(self, amount: float) -> str:
        """Return an amount as people read it: "12.3 USD"."""
        return f"{figure(amount)} {self.currency}"


PRICES: Final[Mapping[str, Price]] = {
    "t4": Price(0.526, source=f"{_ON_DEMAND}, g4dn.xlarge, not looked up again since 2024"),
    "v100": Price(3.06, source=f"{_ON_DEMAND}, p3.2xlarge, not looked up again since 2024"),
    "a10": Price(1.006, source=f"{_ON_DEMAND}, g5.xlarge, 2026-06"),
    "a100-40": Price(1.844, source=f"{_BLOCKS}, p4d.24xlarge / 8"),
    "h100": Price(4.916, source=f"{_BLOCKS}, p5.48xlarge / 8"),
    "h200": Price(5.408, source=f"{_BLOCKS}, p5e.48xlarge / 8"),
}


def read_prices(text: str) -> dict[str, Price]:
    """Return the table of a TOML text, over the prices that are known here.

    Raises:
        UsageError: It is no such table.
    """
    try:
        sections: dict[str, Any] = tomllib.loads(text)
        given = {name: _price(name, one) for name, one in sections.items()}
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            "The price table is not TOML.", why=str(error), do=f"such as\n{_EXAMPLE}"
        ) from error
    return {**PRICES, **given}


def _price(name: str, one: Any) -> Price:
    fields = one if isinstance(one, dict) else {}
    rate, texts = fields.get("per_hour"), {key: fields[key] for key in fields if key != "per_hour"}
    are_texts = all(isinstance(text, str) for text in texts.values())
    is_rate = isinstance(rate, int | float) and rate > 0
    if not (is_rate and are_texts and set(texts) <= {"currency", "source"}):
        raise UsageError(
            f'The price table\'s section "{name}" is no price.',
            why="it has per_hour, a number above 0, and perhaps the texts currency and source",
            do=f"such as\n{_EXAMPLE}",
        )
    return Price(**fields)


# Of Llama 3 405B's pre-training: 419 unexpected interruptions of 16,384 GPUs in 54 days. Source:
# The Llama 3 Herd of Models, 2024, section 3.3.4.
DEVICE_HOURS_PER_FAILURE: Final = 16_384 * 54 * 24 / 419


def seconds_between_failures(
    devices: int, device_hours_per_failure: float = DEVICE_HOURS_PER_FAILURE
) -> float:
    """Return the mean time between failures of any of so many devices."""
    return 3600 * device_hours_per_failure / devices


def checkpoint_interval_s(saving_s: float, between_failures_s: float) -> float:
    """Return the seconds of training between two checkpoints that lose the least time.

    Daly's estimate; Young's is its first term, sqrt(2 C M). Restarting takes as long whatever the
    interval, so it does not count.

    Sources: Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly,
    "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, eq. 37.

    Args:
        saving_s: How long training stands still for a checkpoint.
        between_failures_s: The mean time between failures.
    """
    if saving_s >= 2 * between_failures_s:
        return between_failures_s
    half = math.sqrt(saving_s / (2 * between_failures_s))
    young = math.sqrt(2 * saving_s * between_failures_s)
    return young * (1 + half / 3 + half**2 / 9) - saving_s


def lost_share(interval_s: float, saving_s: float, between_failures_s: float) -> float:
    """Return the share of time that saving and repeating take: half an interval a failure."""
    return saving_s / interval_s + interval_s / (2 * between_failures_s)


@dataclass(frozen=True, slots=True)
class StepsToLoss:
    """When a training may reach a loss.

    Attributes:
        steps: Predicted; infinite where the fitted curve never gets there.
        earliest: Of the curves whose error is at most twice that of the best.
        latest: Likewise; infinite where one of them never gets there.
        error: Of the fit: root mean square, in units of the loss.
    """

    steps: float
    earliest: float
    latest: float
    error: float


def steps_to_loss(
    losses: Sequence[float], target: float, steps: Sequence[int] | None = None
) -> StepsToLoss:
    """Return when a loss would be reached, by a power law through a recorded run.

    `loss = floor + scale * step ** -power` (Hestness et al., "Deep Learning Scaling is Predictable,
    Empirically", 2017) through the second half of the run; of many floors the one with the smallest
    error. It knows nothing of a schedule of the rate: one that changes later moves the answer.

    Args:
        losses: Eight or more, in order.
        target: The loss to be reached.
        steps: At which they were, from 1 on; without them one a step, from the first one on.

    Raises:
        UsageError: Too few losses, or they do not fall.
    """
    at = range(1, len(losses) + 1) if steps is None else steps
    points = list(zip(at, losses, strict=True))[len(losses) // 2 :]
    if len(points) < 4 or not all(map(math.isfinite, losses)):
        raise UsageError("A curve needs eight losses or more, all of them finite.")
    lowest, spread = min(loss for _, loss in points), max(losses) - min(losses)
    floors = [lowest - spread * 2.0 ** (-eighths / 8) for eighths in range(1, 97)]
    fits = [fit for floor in floors if (fit := _power_law(points, floor))]
    if not fits:
        raise UsageError("The losses do not fall, so nothing tells when one is reached.")
    error, best = min((fit[0], at) for at, fit in enumerate(fits))
    # Beside the best floor, since floors between them were not tried.
    near = [fit for at, fit in enumerate(fits) if fit[0] <= 2 * error or abs(at - best) == 1]
    reached = [_reached(fit, target) for fit in near]
    return StepsToLoss(_reached(fits[best], target), min(reached), max(reached), error)


def _reached(fit: tuple[float, float, float, float], loss: float) -> float:
    _, floor, scale, power = fit
    above = (loss - floor) / scale
    return above ** (-1 / power) if above > 0 else math.inf


def _power_law(
    points: Sequence[tuple[int, float]], floor: float
) -> tuple[float, float, float, float] | None:
    """Return the error, floor, scale and power of a line through logarithms; None if it rises."""
    xs = [math.log(step) for step, _ in points]
    ys = [math.log(loss - floor) for _, loss in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    slope /= sum((a - x) ** 2 for a in xs)
    if slope >= 0:
        return None
    scale = math.exp(y - slope * x)
    squares = [(floor + scale * step**slope - loss) ** 2 for step, loss in points]
    return math.sqrt(sum(squares) / len(squares)), floor, scale, -slope
