"""The steps of a cell that were left out, of whose optimizers, and what is said of them. Pure.

A step of a cell may be made by several optimizers, each with gradients of its own. Where one is
left out and another is not, the model is not as before it: that is said.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

_MOST_STEPS = 10
_MOST_OPTIMIZERS = 3


@dataclass(slots=True)
class OptimizersOfStep:
    """Which optimizers a step was left out for, and which have made it."""

    step: int
    left_out: list[str] = field(default_factory=list)
    stepped: list[str] = field(default_factory=list)

    @property
    def kind(self) -> tuple[list[str], list[str]]:
        """What steps have in common that one sentence tells of."""
        return (sorted(self.left_out), sorted(self.stepped)) if self.stepped else ([], [])


class LeftOutSteps:
    """Those of one cell, in their order."""

    def __init__(self) -> None:
        """Begin with none."""
        self.steps: list[OptimizersOfStep] = []
        self._newest = OptimizersOfStep(0)

    def note_left_out(self, step: int | None, optimizer: str) -> int | None:
        """Note that an optimizer's call was left out.

        Args:
            step: Of which step of the cell; None where they are not counted.
            optimizer: A name for it.

        Returns:
            The number of the step, where no other optimizer's was left out in it.
        """
        of_step = self._of(len(self.steps) + 1 if step is None else step)
        of_step.left_out.append(optimizer)
        if len(of_step.left_out) > 1:
            return None
        self.steps.append(of_step)
        return of_step.step

    def note_stepped(self, step: int, optimizer: str) -> None:
        """Note that an optimizer has made a step of the cell."""
        self._of(step).stepped.append(optimizer)

    def _of(self, step: int) -> OptimizersOfStep:
        if self._newest.step != step:
            self._newest = OptimizersOfStep(step)
        return self._newest

    def sentences(self, ranks: str) -> list[str]:
        """Return a sentence about each kind of them; `ranks` says on which."""
        ordered = sorted(self.steps, key=lambda one: one.kind)
        kinds = [list(kind) for _, kind in groupby(ordered, key=lambda one: one.kind)]
        kinds.sort(key=lambda kind: kind[0].step)
        return [_said(kind, ranks) for kind in kinds]


def _said(steps: list[OptimizersOfStep], ranks: str) -> str:
    """Return the sentence about steps that the same optimizers were left out of."""
    named = [f"{one.step:,}" for one in steps[:_MOST_STEPS]]
    if len(steps) > _MOST_STEPS:
        named.append(f"{len(steps) - _MOST_STEPS:,} more")
    is_one = len(steps) == 1
    which = f"Step{'' if is_one else 's'} {_listed(named)} {'was' if is_one else 'were'} left out"
    counts = f"a schedule has counted {'it' if is_one else 'them'}."
    first = steps[0]
    if not first.stepped:
        return (
            f"{which} {ranks}: gradients were not finite. Weights, buffers and the optimizer's "
            f"state are as before; {counts}"
        )
    have = "have" if len(first.stepped) > 1 else "has"
    # Optimizers of two models may have the same name.
    others = [f"another {one}" if one in first.left_out else one for one in first.stepped]
    theirs = "their weights and states" if len(first.left_out) > 1 else "its weights and state"
    return (
        f"{which} {ranks} for {_optimizers(first.left_out)} alone, whose gradients were not "
        f"finite: {theirs} are as before. In the same step{'' if is_one else 's'} "
        f"{_optimizers(others)} {have} stepped; {counts}"
    )


def _optimizers(names: Iterable[str]) -> str:
    each = list(dict.fromkeys(names))
    if len(each) > _MOST_OPTIMIZERS:
        each[_MOST_OPTIMIZERS:] = [f"{len(each) - _MOST_OPTIMIZERS} more"]
    return _listed(each)


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
