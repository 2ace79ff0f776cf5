"""When each stage of this rank ran which micro-batch: a row of some steps, for the picture.

The same steps on all ranks, which agree without a word: the first ones, then powers of two. Main
thread.
"""

import time
from collections.abc import Callable
from typing import Any

from nbdist.engine.training import training
from nbdist.shared import wire


class StageTimes:
    """The times of the step that is being made.

    Attributes:
        report: Takes a kind of row, the step and its values; None where nobody listens.
    """

    def __init__(self) -> None:
        self.report: Callable[[str, int, dict[str, float]], None] | None = None
        self._values: dict[str, float] = {}

    def timed(self, kind: str, stage: int, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of torch's that runs a micro-batch, whose number it takes first."""

        def noted(number: int, *args: Any, **keywords: Any) -> Any:
            began_s = time.time()
            result = run(number, *args, **keywords)
            self._values |= wire.stage_values(kind, stage, number, began_s, time.time())
            return result

        return noted

    def step_ended(self) -> None:
        """Report the micro-batches of a step that a schedule has run, if it is one of those."""
        values, self._values = self._values, {}
        step = (training.here.current_step() or 0) + 1
        if self.report is not None and values and not step & (step - 1):
            self.report(wire.STAGES, step, values)


here = StageTimes()
