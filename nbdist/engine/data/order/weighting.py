"""Parts of a batch that differ in size: what is asked for, and whether a loop heeds it.

A rank with a small part of the batch has a gradient of few samples. Averaged with the others' as
if all were equally large, its samples count more. `layout.step` weighs by size; a plain loop must
do it itself, by `loader.share`, and is told where it does not.

`"measured"` weights follow the ranks' own pace; ranks tell it each other when a loop begins.

Main thread.
"""

import math
from collections.abc import Iterable, Sequence

from nbdist.engine.component import Component, EndedCell
from nbdist.shared.errors import UsageError
from nbdist.shared.text import counted

MEASURED = "measured"
ALIKE = 0.9  # what differs by less is one: noise must not move samples, or be told of

UNHEEDED = (
    "weights= gives the ranks parts of different size, and this loop averages the ranks' gradients "
    "as if all were equally large: samples of a small part count more. layout.step(x, y, loss_fn) "
    "weighs them; in a plain loop (loss * loader.share).backward() does."
)
UNEVEN = (
    "Of a batch of {samples} samples some ranks had {more} and others {fewer}, and this loop "
    "averages the ranks' gradients as if all had equally many: those of the latter count "
    "{extra:.0%} more in that step. layout.step(x, y, loss_fn) weighs them; in a plain loop "
    "(loss * loader.share).backward() does."
)


def checked(
    weights: Sequence[float] | str | None, parts: int, global_batch: int
) -> tuple[float, ...] | None:
    """Return the weights as they are kept: None for equal parts.

    Args:
        weights: One number a part; None for equal parts.
        parts: Into how many a batch is cut.
        global_batch: Samples in a batch.

    Raises:
        UsageError: Not one positive number a part, or fewer samples than parts.
    """
    if weights is None:
        return None
    numbers: list[object] = list(weights) if isinstance(weights, Sequence) else []
    found = [float(n) for n in numbers if isinstance(n, int | float) and not isinstance(n, bool)]
    if not numbers or len(found) < len(numbers) or not all(map(_is_weight, found)):
        raise UsageError(
            f"weights={weights!r} are not valid weights.",
            why="each rank's part of a batch follows its number, which is more than 0",
            do='give one number a rank, as in [1, 0.5], or "measured"; None shares equally',
        )
    if len(numbers) != parts:
        raise UsageError(
            f"The loader has {len(numbers)} weights, and a batch has {counted(parts, 'part')}.",
            why="a weight belongs to one part; ranks of one tp group share theirs",
            do=f"loader.weights = {[1] * parts}, or other numbers; None shares equally",
        )
    if global_batch < parts:
        raise UsageError(f"A batch of {global_batch} samples has no {parts} parts.")
    return tuple(found)


def from_paces(paces: Iterable[tuple[int, float]], parts: int) -> tuple[float, ...] | None:
    """Return the weights that ranks' paces ask for; None for equal parts.

    Args:
        paces: Of each rank its part of a batch, and the samples it works through in a second, 0
            where that is not known yet. A part is worked on as fast as its slowest rank does.
        parts: Into how many a batch is cut.
    """
    slowest = [math.inf] * parts
    for part, pace in paces:
        slowest[part] = min(slowest[part], pace)
    fastest = max(slowest)
    if min(slowest) <= 0 or fastest == math.inf or min(slowest) >= ALIKE * fastest:
        return None
    return tuple(max(0.01, round(pace / fastest, 2)) for pace in slowest)


def _is_weight(number: float) -> bool:
    return math.isfinite(number) and number > 0


def uneven(samples: int, parts: int) -> str:
    """Return what is to be said of a batch that equal weights do not share out equally.

    Nothing where the parts are nearly equal, as all large ones are, or a rank has no sample at all.
    """
    fewer, extra = divmod(samples, parts)
    more = fewer + bool(extra)
    if not fewer or fewer > ALIKE * more:
        return ""
    return UNEVEN.format(samples=samples, more=more, fewer=fewer, extra=more / fewer - 1)


class Heed:
    """Whether the steps on one loader's batches weigh its parts."""

    def __init__(self) -> None:
        self._untold = ""  # what is wrong with a step on the newest batch
        self._is_told = False

    def give(self, unweighed: str) -> None:
        """Note that the loop gets another batch.

        Args:
            unweighed: What is told if its gradient is not weighed; empty where all parts are equal.
        """
        self._untold = unweighed

    def weigh(self) -> None:
        """Note that the newest batch's gradient is weighed by its part."""
        self._untold = ""

    def step(self) -> None:
        """Note that an optimizer has stepped; tell, once, of gradients that were not weighed."""
        if self._untold and not self._is_told:
            self._is_told = True
            here.note(self._untold)


class Unweighed(Component):
    """What is to be said of loops whose gradients were not weighed."""

    def __init__(self) -> None:
        self._notices: list[str] = []
        self._is_rest_told = False  # of a rest that is shared unequally a session is told once

    def note(self, notice: str) -> None:
        """Note what is to be said of a loop: `UNHEEDED`, or of an `uneven` batch."""
        if notice != UNHEEDED and self._is_rest_told:
            return
        self._is_rest_told |= notice != UNHEEDED
        self._notices.append(notice)

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Return what is to be said of loops, once."""
        taken = tuple(self._notices)
        self._notices.clear()
        return taken


here = Unweighed()
