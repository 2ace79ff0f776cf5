"""Report, at the end of some steps, values that the notebook compares between ranks.

Main thread, in the hook on optimizers. Steps are chosen by their number alone, so that all ranks
report the same ones: soon after a cell's begin, where most goes wrong, then every `EVERY`. The
state of a layout counts its own steps: a rank may train something else beside it.
"""

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nbdist.engine.checks import splits
from nbdist.engine.checks.at_end import Add, AtEnd
from nbdist.engine.checks.draws import Draws
from nbdist.engine.checks.epochs import Epochs
from nbdist.engine.checks.fingerprints import fingerprints_by_name, replicated
from nbdist.engine.checks.left_changed import LeftChanged
from nbdist.engine.checks.means import Means
from nbdist.engine.checks.unowned import Complete
from nbdist.engine.checks.unstepped import Unstepped
from nbdist.engine.checks.use import Use
from nbdist.engine.compat import torch_hooks, torch_live, torch_modules, torch_wrappers
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.data.order import sampler
from nbdist.engine.layout.layout import Layout
from nbdist.engine.steps import keep
from nbdist.engine.tap import tap
from nbdist.engine.training import training
from nbdist.shared import wire
from nbdist.shared.wire import CELL_END, CellStart

_log = logging.getLogger("nbdist.checks")

EVERY = 100
SOON = frozenset({1, 2, 5, 10, 20, 50})


def is_due(step: int) -> bool:
    """Return whether ranks report this step."""
    return step in SOON or step % EVERY == 0


def next_due(step: int) -> int:
    """Return the first step after this one that ranks report."""
    return min([step - step % EVERY + EVERY, *(soon for soon in SOON if soon > step)])


class RankChecks(Component):
    """One rank's reports of the models that the cell trains, in the order of their first steps.

    Others may be alive on some ranks only, for Python frees them when it likes.
    """

    def __init__(self, add: Add) -> None:
        """Begin.

        Args:
            add: Makes a record of a kind, a step and its values.
        """
        self._add = add
        self._uses: list[Use] = []
        # By a layout's number in the cell: the first of its steps that this rank has yet to report.
        self._due: dict[int, int] = {}
        self._numbers: weakref.WeakKeyDictionary[Layout, int] = weakref.WeakKeyDictionary()
        self._next = 0  # the first step that this rank has yet to report
        self._passes = 0  # over DataLoaders, at the newest step
        self._is_looking = False  # at the step that runs
        self._scaled_before = 0  # losses that GradScalers had scaled when the step began
        self._sent_before: float | None = None  # bytes, when the newest backward began
        self._epochs = Epochs()
        self._complete = Complete()
        self._at_end = AtEnd(add)
        self._unstepped = Unstepped()
        self._changed = LeftChanged()
        self._means = Means()
        self._draws = Draws()

    def made(self, made: object) -> None:
        """Note an optimizer that is made: whether it has all that its model can train."""
        if isinstance(made, Optimizer):
            self._complete.made(made)

    def cell_began(self, start: CellStart) -> None:
        """Look whether an optimizer is forgotten, and what of the process is changed."""
        self._unstepped.cell_began()
        self._changed.cell_began(is_script=start.script is not None)

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Remove all hooks: a replacement rank must not receive any.

        A failed cell leaves ranks different, until they are repaired.
        """
        forgotten = self._unstepped.in_cell(cell.source)
        if cell.has_succeeded:
            self._at_end.report()
            if forgotten:
                self._add("left", CELL_END, {"backwards": float(training.here.backwards())})
        self._report_changed(cell.source)
        if self._is_looking:
            self._look(is_on=False)
        for use in self._uses:
            use.end()
        self._uses.clear()
        self._due.clear()
        self._numbers.clear()
        self._next = self._passes = 0
        self._epochs, self._means = Epochs(), Means()
        return ()

    def _report_changed(self, source: str) -> None:
        """Report what is left changed; an error that has ended a cell often leaves something."""
        try:
            values = self._changed.in_cell(source, keep.here.names())
        except Exception:  # any object may be where a stream was
            _log.exception("What the cell has left changed could not be read")
            return
        if values:
            self._add("left", CELL_END, values)

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Note the model of an optimizer; before its first step in a cell."""
        use = Use(optimizer, self._complete)
        if values := use.at_first():
            self._add("use", 0, values | {"optimizer": float(len(self._uses))})
        self._uses.append(use)
        if use.layout is not None:
            use.has_layout = True
            use.number = self._numbers.setdefault(use.layout, len(self._due))
            self._due.setdefault(use.number, 1)

    def step_ended(self, step: int) -> int:
        """Report this rank's state and work, if the step is due; return the next that is.

        Costs a pass over the parameters, at most `fingerprint.SELECTION` elements of each; on a
        GPU it waits for what is queued.
        """
        due = self._report_replicas(step) if self._numbers else sys.maxsize
        repeated: dict[str, float] = {}
        if (passes := training.here.passes()) != self._passes:  # not at most steps
            self._passes = passes
            optimizer = training.here.newest_optimizer()
            repeated = self._epochs.repeated(optimizer, *training.here.current_pass())
        if step + 1 >= self._next or repeated:
            if is_due(step) or repeated:
                self._report_uses(step, repeated)
            self._next = next_due(step)
            is_on = self._next == step + 1
            if is_on or self._is_looking:
                self._look(is_on=is_on)
        return min(due, max(step + 1, self._next - 1))  # what it looks at begins a step before

    def _report_replicas(self, step: int) -> int:
        """Report the layouts that are due; return the first step at which another may be."""
        made: Counter[int] = Counter()  # by its optimizers, which may follow one another
        for use in self._uses:
            if use.has_layout:
                made[use.number] += use.steps
        ahead = sys.maxsize - step
        for layout, number in self._numbers.items():
            count = made[number]
            if count >= self._due[number]:
                self._report_replica(layout, number, count)
                self._due[number] = next_due(count)
            # Several optimizers make more than one in a step.
            ahead = min(ahead, 1 if count > step else self._due[number] - count)
        return step + ahead

    def _report_replica(self, layout: Layout, number: int, step: int) -> None:
        prefix = f"{number}:" if number else ""
        held = [(prefix + n, t) for n, t in replicated(layout) if t.numel()]
        if held:
            self._add("alike", step, fingerprints_by_name(held))

    def _report_uses(self, step: int, repeated: dict[str, float]) -> None:
        reduced = tap.look_for_reductions(False)
        iterator, _ = training.here.current_pass()
        of_all = self._scaling() | self._means.take() | splits.split_of(iterator) | repeated
        of_all |= splits.replicas_of(iterator) | self._draws.take()
        of_all |= {"optimizers": len(self._uses), "shared": sampler.is_shared_out(iterator)}
        for number, use in enumerate(self._uses):
            values = use.at_step_end(reduced) | {"optimizer": number} | of_all
            self._add("use", step, {name: float(value) for name, value in values.items()})
            if held := [(f"{wire.BY_HAND}{number}:{n}", p) for n, p in use.replica()]:
                self._add("alike", step, fingerprints_by_name(held))

    def _scaling(self) -> dict[str, float]:
        """Return how the step's loss was scaled, and whether gradients were divided again."""
        scalers = torch_live.here.live(torch.amp.GradScaler)
        return {
            "scalers": float(sum(map(torch_modules.has_scaled, scalers))),
            "scaled": float(torch_hooks.count_of_scaled() - self._scaled_before),
            "unscaled": float(any(use.is_unscaled for use in self._uses)),
        }

    def _look(self, *, is_on: bool) -> None:
        self._is_looking = is_on
        self._scaled_before = torch_hooks.count_of_scaled()
        tap.look_for_reductions(is_on)
        torch_wrappers.here.after_clipping(self._clipped if is_on else None)
        if is_on:
            training.here.at_backward(self._backward_begins, self._backward_ends)
            training.here.at_fetch(self._draws.fetch_begins, self._draws.fetch_ended)
        else:
            training.here.at_backward(None)
            training.here.at_fetch(None)
        for use in self._uses:
            use.look(is_on=is_on)

    def _backward_begins(self, root: Any, gradient: Any) -> None:
        self._means.backward_begins(root, gradient)
        self._sent_before = tap.untaken_bytes()
        for use in self._uses:
            use.backward_begins()

    def _clipped(self, parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
        if torch_hooks.count_of_scaled() == self._scaled_before:
            return
        try:
            for use in self._uses:
                use.clipped(parameters, float(max_norm), norm)
        except Exception:
            _log.exception("A norm that was clipped could not be read")
            torch_wrappers.here.after_clipping(None)

    def _backward_ends(self) -> None:
        sent = tap.untaken_bytes()
        if sent is not None and self._sent_before is not None:
            for use in self._uses:
                use.backward_ends(sent - self._sent_before)
