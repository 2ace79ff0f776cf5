"""`nbdist.save`: the whole training to a folder, a path or a URL, while training goes on.

Threads: cells call it on the main thread of all ranks; each save has one thread of its own a rank.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable
from numbers import Real
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from nbdist.engine.checkpoint import planning, rest, saved, steady, training_state
from nbdist.engine.checkpoint.folder import CheckpointFolder
from nbdist.engine.checkpoint.planning import PreparedSave, SaveRequest
from nbdist.engine.checkpoint.saving import Saving
from nbdist.engine.checkpoint.training_state import Training
from nbdist.engine.compat.checkpoints.torch_checkpoint import WritePlanner
from nbdist.engine.component import Component, EndedCell
from nbdist.shared import side
from nbdist.shared.errors import NBDistError, UsageError
from nbdist.shared.text import counted, figure, name_bytes
from nbdist.shared.wire import CellStart

AT_CELL_END_S = 60.0  # that a cell's end waits for what is still being written


def save(
    name: str | os.PathLike[str] | None = None,
    *,
    what: Collection[Any] | None = None,
    metric: float | None = None,
    higher_is_better: bool = False,
    keep: int | None = 3,
    wait: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> Saving:
    """Save what a cell trains; the next `nbdist.restore()` goes on from it. On all ranks together.

        for x, y in loader:
            ...
            opt.step(); scheduler.step(); opt.zero_grad()
            if step % 100 == 0:
                nbdist.save()

    Saved is what the cell trains: the optimizers that have stepped in it, and those that were made
    together with them; before any has, all that cells can reach. To them belong models with a
    layout (or DDP, `fully_shard`), all that names lead to and that has `state_dict` and
    `load_state_dict` (schedulers, scalers, averages), loaders, what `nbdist.keep` names, and each
    rank's random numbers. Models that cells can reach and that are left out the cell names. Each
    checkpoint has a folder of its own, which counts when it is complete; none is overwritten.

    Training stands still while ranks agree; a thread copies this rank's part, for which the next
    optimizer's step waits, and writes it. A save that begins while another is being written waits
    for it. A cell ends when its checkpoints are written.

    Args:
        name: A word for checkpoints beside the notebook's own, a folder, or a URL that fsspec
            opens (`s3://bucket/run`). By itself `.nbdist/checkpoints` and the notebook's name.
        what: Models and optimizers, or the names of their variables, that are saved with what hangs
            on them, whatever the cell trains.
        metric: A number, such as the loss of a validation: the checkpoint with the best stays.
            Rank 0's counts.
        higher_is_better: Whether that is the highest.
        keep: How many of the newest stay, from 1; None keeps all. Those that a cell saves by
            itself (`--checkpoint`) are counted apart.
        wait: Return only when it counts. Nothing is copied then.
        storage_options: For the library behind a URL, as fsspec takes them.

    Returns:
        The save: `folder`, `step`, `blocked_s`, and `wait()`.

    Raises:
        CheckpointError: It cannot be saved there, or `wait` is set and writing failed; the same on
            all ranks, and the checkpoint before it still counts. What fails later the cell's last
            lines say.
        UsageError: `what`, `keep` or `metric` makes no sense, or this is no rank.
    """
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise UsageError(f"nbdist.save keeps 1 checkpoint or more, not {keep!r}; None keeps all.")
    if metric is not None and not _is_number(metric):
        raise UsageError(f"nbdist.save takes a number as its metric, not {metric!r}.")
    if not (what is None or (isinstance(what, list | tuple) and what)):
        raise UsageError(f"nbdist.save takes a list of models and optimizers, not what={what!r}.")
    require_rank("nbdist.save")

    def find() -> Training:
        if what is None:
            return training_state.of_cell()
        return training_state.asked(training_state.find(), what, "nbdist.save")

    rated = None if metric is None else float(metric) * (-1 if higher_is_better else 1)
    saving, training = here.begin(find, name, rated, keep, storage_options, waits=wait)
    here.left_out.update(dict.fromkeys(training.left_out))
    try:
        saving.go(lambda: rest.facts_of(training, rest.moment(training)))
        return saving.wait() if wait else saving
    except BaseException:
        saving.leave()  # an interrupt, say: what follows may change what is being written
        raise


def described(what: object) -> str:
    """Return what ranks compare of a list of objects or names: each rank's are others."""
    if not isinstance(what, list | tuple):
        return repr(what)
    return ", ".join(one if isinstance(one, str) else type(one).__name__ for one in what)


def _is_number(metric: object) -> bool:
    is_real = isinstance(metric, Real) and not isinstance(metric, bool)
    return is_real or (isinstance(metric, torch.Tensor) and metric.numel() == 1)


def require_rank(call: str) -> None:
    """Refuse a call where there is no process group, as in a plain cell of the notebook."""
    side.require_rank(call)
    if not dist.is_initialized():
        raise UsageError(
            f"{call} is for ranks, and this process is none.",
            do="call it in a %%distributed cell, on all ranks",
        )


def not_written(step: int, error: NBDistError) -> str:
    """Return what is said of a checkpoint that failed, with its cause."""
    said = f"The checkpoint of step {step:,} was not written"
    cause = " ".join(filter(None, (error.what, error.why)))
    return cause if error.what.startswith(said) else f"{said}. {cause}"


class Saves(Component):
    """What the cell that runs has saved, and of what there is a checkpoint."""

    def __init__(self) -> None:
        self.left_out: dict[str, None] = {}  # models that the cell could have saved, too
        self.restores = 0  # trainings that calls of `nbdist.restore` have brought back here
        self.restored_at = 0.0  # when the last of them was saved
        self._newest: Saving | None = None
        self._written: list[Saving] = []  # of this cell
        self._known: WeakSet[torch.optim.Optimizer] = WeakSet()  # of which there is a checkpoint
        # A save, and what is said of it when the next step begins.
        self._untold: tuple[Saving, Callable[[], rest.Facts]] | None = None

    def cell_began(self, start: CellStart) -> None:
        """Begin a cell: what an earlier one has saved is told."""
        saved.here.lie_beside(start.checkpoints)
        self._written.clear()
        self.left_out.clear()

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Wait until what the cell has saved is written, and return what is to be said of it."""
        if not self._written:
            return ()
        if self._newest is not None:
            self._newest.copied()  # what follows a cell, a recovery say, changes what it trained
            self._newest.settle(AT_CELL_END_S)
        return (*self._failures(), *self._successes())

    def begin(
        self,
        find: Callable[[], Training],
        name: str | os.PathLike[str] | None,
        metric: float | None,
        keep: int | None,
        storage_options: dict[str, Any] | None = None,
        *,
        is_automatic: bool = False,
        waits: bool = False,
    ) -> tuple[Saving, Training]:
        """Collect what is found, begin to copy and write it; `go` tells its facts. As `save`.

        With `waits` the caller changes nothing until it is written.
        """
        began = time.monotonic()
        self.settle()

        def prepare() -> PreparedSave:
            training = find()
            folder = CheckpointFolder(saved.place_of(name), storage_options)
            layouts = training_state.layouts(training)
            request = SaveRequest(folder, training.step, layouts, metric, keep, is_automatic)
            planner = WritePlanner(training_state.tree(training, dist.get_rank()), dist.get_rank())
            return PreparedSave(request, training, planner, steady.find(training))

        agreed = planning.agree(prepare)
        training = agreed.prepared.training
        saving = Saving(agreed, began, waits=waits)
        self.know(training)
        self._newest = saving
        self._written.append(saving)
        return saving, training

    def has_saved(self, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Return whether a checkpoint was begun, or restored, of what one of these trains."""
        return any(optimizer in self._known for optimizer in optimizers)

    def know(self, training: Training) -> None:
        """Remember that there is a checkpoint of this training."""
        self._known.update(training.optimizers)

    def tell_later(self, saving: Saving, facts: Callable[[], rest.Facts]) -> None:
        """Let a save's facts be told when `tell` is called next."""
        self._untold = saving, facts

    def tell(self) -> None:
        """Tell the facts that were left for later, if any were."""
        if self._untold is not None:
            (saving, facts), self._untold = self._untold, None
            saving.go(facts)

    def settle(self) -> None:
        """Wait until the newest save is over."""
        self.tell()  # nothing else would while this rank waits
        if self._newest is not None:
            self._newest.copied()
            self._newest.settle()

    def give_up(self, why: str) -> None:
        """End the save that is being written: a rank that has a part of it is gone."""
        if self._newest is not None and not self._newest.is_done:
            self._newest.give_up(why)

    def blocked(self) -> tuple[int, float]:
        """Return how many checkpoints the cell has begun, and how many seconds it stood still."""
        return len(self._written), sum(one.blocked_s for one in self._written)

    def first_failure(self) -> str:
        """Return what is said of the cell's first checkpoint that failed so far, or nothing."""
        failed = (not_written(o.step, o.error) for o in self._written if o.error is not None)
        return next(failed, "")

    def _failures(self) -> list[str]:
        failed = [one for one in self._written if one.error is not None]
        said = [self.first_failure()] if failed else []
        if len(failed) > 1:
            more = counted(len(failed) - 1, "more checkpoint")
            said.append(f"{more} failed, the newest of step {failed[-1].step:,}.")
        return said + [
            f"The checkpoint of step {one.step:,} is still being written."
            for one in self._written
            if one.error is None and not one.is_done
        ]

    def _successes(self) -> list[str]:
        done = [one for one in self._written if one.is_done and one.error is None]
        if not done:
            return []
        blocked = sum(one.blocked_s for one in done)
        newest = done[-1]
        said = (
            f"{counted(len(done), 'checkpoint')} saved, the newest of step {newest.step:,} in "
            f"{newest.folder} ({name_bytes(newest.nbytes)} a rank); training stood still for "
            f"{figure(blocked)} s."
        )
        if not self.left_out:
            return [said]
        names = ", ".join(self.left_out)
        return [
            said,
            f"Without {names}, not trained in this cell: nbdist.save(what=[...]) names models.",
        ]


here = Saves()
