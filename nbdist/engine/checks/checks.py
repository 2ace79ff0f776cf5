"""Report, at the end of some steps, values that the notebook compares between ranks.

Main thread, in the hook on optimizers. Steps are chosen by their number alone, so that all ranks
report the same ones: soon after a cell's begin, where most goes wrong, then every `EVERY`. The
state of a layout counts its own steps: a rank may train something else beside it.
"""

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from nbdist.engine.checks.at_end import Add, AtEnd
from nbdist.engine.checks.fingerprints import fingerprints_by_name, replicated
from nbdist.engine.checks.left_changed import LeftChanged
from nbdist.engine.checks.means import Means
from nbdist.engine.checks.splits import split_of
from nbdist.engine.checks.unstepped import Unstepped
from nbdist.engine.checks.use import Use
from nbdist.engine.compat import torch_hooks, torch_live, torch_modules
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.data.order import sampler
from nbdist.engine.layout.layout import Layout
from nbdist.engine.steps import keep
from nbdist.engine.tap import tap
from nbdist.engine.training import training
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
        self._steps: dict[int, int] = {}  # of each layout, by its number in the cell
        self._due: dict[int, int] = {}  # and the first of them that this rank has yet to report
        self._numbers: weakref.WeakKeyDictionary[Layout, int] = weakref.WeakKeyDictionary()
        self._next = 0  # the first step that this rank has yet to report
        self._passes = 0  # over DataLoaders, at the newest step
        self._is_looking = False  # at the step that runs
        self._scaled_before = 0  # losses that GradScalers had scaled when the step began
        self._sent_before: float | None = None  # bytes, when the newest backward began
        self._epochs = Epochs()
        self._at_end = AtEnd(add)
        self._unstepped = Unstepped()
        self._changed = LeftChanged()
        self._means = Means()

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
        self._steps.clear()
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
        use = Use(optimizer)
        if values := use.at_first():
            self._add("use", 0, values | {"optimizer": float(len(self._uses))})
        self._uses.append(use)
        if use.layout is not None:
            use.number = self._numbers.setdefault(use.layout, len(self._steps))
            self._steps.setdefault(use.number, 0)
            self._due.setdefault(use.number, 1)

    def step_ended(self, step: int) -> None:
        """Report this rank's state and work, if the step is due.

        Costs a pass over the parameters, at most `fingerprint.SELECTION` elements of each; on a
        GPU it waits for what is queued.
        """
        if self._numbers:
            self._report_replicas()
        has_repeated = False
        if (passes := training.here.passes()) != self._passes:  # not at most steps
            self._passes = passes
            has_repeated = self._epochs.is_repeated(*training.here.current_pass())
        if step + 1 < self._next and not has_repeated:  # as in most steps
            return
        if is_due(step) or has_repeated:
            self._report_uses(step, has_repeated=has_repeated)
        self._next = next_due(step)
        is_on = self._next == step + 1
        if is_on or self._is_looking:
            self._look(is_on=is_on)

    def _report_replicas(self) -> None:
        # At each step, with torch's work in the caches: a call more would cost microseconds.
        counted: tuple[int, ...] = ()
        for use in self._uses:
            if use.has_stepped:
                use.has_stepped, number = False, use.number
                if number not in counted:  # once each, where several optimizers train one model
                    counted += (number,)
                    self._steps[number] += 1
                    if self._steps[number] == self._due[number]:
                        self._report_replica(use.layout, number)

    def _report_replica(self, layout: Layout | None, number: int) -> None:
        step = self._steps[number]
        self._due[number] = next_due(step)
        if layout is not None:
            prefix = f"{number}:" if number else ""
            held = [(prefix + n, t) for n, t in replicated(layout) if t.numel()]
            if held:
                self._add("alike", step, fingerprints_by_name(held))

    def _report_uses(self, step: int, *, has_repeated: bool) -> None:
        reduced = tap.look_for_reductions(False)
        of_all = self._scaling() | self._means.take() | split_of(training.here.current_pass()[0])
        for number, use in enumerate(self._uses):
            values = use.at_step_end(reduced)
            values |= {"optimizer": number, "same_epoch": has_repeated} | of_all
            values["optimizers"] = len(self._uses)
            values["shared"] = sampler.is_shared_out(training.here.current_pass()[0])
            self._add("use", step, {name: float(value) for name, value in values.items()})

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
        if is_on:
            training.here.at_backward(self._backward_begins, self._backward_ends)
        else:
            training.here.at_backward(None)
        for use in self._uses:
            use.look(is_on=is_on)

    def _backward_begins(self, root: Any, gradient: Any) -> None:
        self._means.backward_begins(root, gradient)
        self._sent_before = tap.untaken_bytes()
        for use in self._uses:
            use.backward_begins()

    def _backward_ends(self) -> None:
        sent = tap.untaken_bytes()
        if sent is not None and self._sent_before is not None:
            for use in self._uses:
                use.backward_ends(sent - self._sent_before)


class Epochs:
    """The epoch of each shuffling sampler when a pass over it began."""

    def __init__(self) -> None:
        self._iterator: weakref.ref[Any] | None = None
        self._began_at = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def is_repeated(self, iterator: Any, began_at: int) -> bool:
        """Return whether a new pass has begun, in the order of the one before."""
        known = None if self._iterator is None else self._iterator()
        if iterator is None or (known is iterator and began_at == self._began_at):
            return False
        self._iterator, self._began_at = weakref.ref(iterator), began_at
        sampler = torch_hooks.sampler_of(iterator)
        if not (isinstance(sampler, DistributedSampler) and sampler.shuffle):
            return False
        before = self._seen.get(sampler)
        self._seen[sampler] = sampler.epoch
        return before == sampler.epoch
