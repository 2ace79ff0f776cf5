"""Read which steps of a cell are profiled: `5`, or `10-14`. Pure."""

import re
from dataclasses import dataclass

from nbdist.shared.errors import UsageError

WARM_UP = 2  # the first step makes reducers and optimizers' states, the second new buckets
MOST = 1000


@dataclass(frozen=True, slots=True)
class ChosenSteps:
    """The steps `first` to `last` of a cell, counted from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return name_steps(range(self.first, self.last + 1))


def parse_steps(text: str) -> ChosenSteps:
    """Return the steps that `text` means.

    Args:
        text: A number of steps, taken after a warm-up of two, or a range such as `10-14`.

    Raises:
        UsageError: It is neither, or asks for more than `MOST` steps.
    """
    found = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", text)
    if found is None:
        raise UsageError(
            f"--profile takes a number of steps, such as 5, or a range of them, such as 10-14, "
            f"not {text!r}."
        )
    low, high = found.groups()
    if high is None:
        first, last = WARM_UP + 1, WARM_UP + int(low)
    else:
        first, last = int(low), int(high)
    if first < 1 or last < 1 or int(low) < 1:
        raise UsageError(f"--profile counts steps from 1, and records at least one, not {text!r}.")
    if first > last:
        raise UsageError(f"--profile: the range {text!r} runs backwards; write {last}-{first}.")
    if last - first >= MOST:
        raise UsageError(f"--profile records at most {MOST} steps, not {last - first + 1}.")
    return ChosenSteps(first, last)


def name_steps(steps: range) -> str:
    """Return consecutive steps in words: `step 3`, `steps 3-5`."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
