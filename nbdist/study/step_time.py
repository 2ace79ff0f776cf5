"""The time of a step from its parts, and what of its communication computation can hide. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# The share of a step's computation behind which an axis can communicate: gradients behind the
# backward, which is two thirds of it, shards behind both. What tp, cp and ep send is waited for.
HIDES_BEHIND: Final[Mapping[str, float]] = {"dp": 2 / 3, "fsdp": 1.0, "pp": 1.0}


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step of a rank, by what it does in them.

    Attributes:
        compute_s: Forward, backward and optimizer.
        exposed_s: Communication that no computation hides.
        hidden_s: Communication behind computation: no part of the total.
        bubble_s: A stage of a pipeline has nothing to do.
        loader_s: It waits for data.
        skew_s: It waits for slower ranks.
        serial_s: What does not get shorter with more ranks: Python, the launches of kernels.
    """

    compute_s: float
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    bubble_s: float = 0.0
    loader_s: float = 0.0
    skew_s: float = 0.0
    serial_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole step."""
        return (
            self.compute_s
            + self.exposed_s
            + self.bubble_s
            + self.loader_s
            + self.skew_s
            + self.serial_s
        )


def split_communication(
    compute_s: float, by_axis: Mapping[str, float], overlap: float = 1.0
) -> tuple[float, float]:
    """Return the seconds of communication that stay exposed, and those that are hidden.

    Args:
        compute_s: Of the step.
        by_axis: Seconds of communication, by axes as `Traffic` names them: "fsdp", "dp x fsdp".
        overlap: The share of what could be hidden that is; 1 where nothing is in the way. On CPUs
            it is measured: communication needs the cores that compute.
    """
    exposed = hidden = 0.0
    left_s = compute_s  # all axes share one stream of computation
    for axes, seconds in sorted(by_axis.items(), key=lambda one: _behind(one[0])):
        could = min(seconds, left_s, _behind(axes) * compute_s) * overlap
        hidden += could
        exposed += seconds - could
        left_s -= could
    return exposed, hidden


def _behind(axes: str) -> float:
    return min((HIDES_BEHIND.get(axis, 0.0) for axis in axes.split(" x ")), default=0.0)
