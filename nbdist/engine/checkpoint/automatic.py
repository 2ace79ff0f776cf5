"""`%%distributed --checkpoint every=100`: saved at step boundaries, gone on from after a fault.

A boundary is the end of the last optimizer's step of an iteration. What follows it (a scheduler, an
average of weights) is read when the next step begins. When the cell is run again and what was
trained is lost or made again, its first loop over a loader goes on from the cell's newest
checkpoint. Main thread.
"""

import logging
import math
import threading
import time
from collections.abc import Iterable
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist

from nbdist.engine.checkpoint import folder, rest, restore, save, saved, training_state
from nbdist.engine.checkpoint.agreement import each, from_rank_0, together
from nbdist.engine.checkpoint.folder import CheckpointFolder
from nbdist.engine.checkpoint.saved import Chosen, place_of
from nbdist.engine.checkpoint.saving import Saving
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.data.position import position, resume
from nbdist.engine.group import group
from nbdist.engine.recovery import sync_state
from nbdist.engine.steps import halt, step_state
from nbdist.shared.errors import CheckpointError, NBDistError
from nbdist.shared.text import figure
from nbdist.shared.wire import CellStart, CheckpointEvery, Repeat

_MOST_S: Final = 10.0  # that a rank stands still for a notebook that does not answer
FAILURE_S = 24 * 3600.0  # between two faults, where nothing has been seen

Optimizer = torch.optim.Optimizer

_log = logging.getLogger("nbdist.checkpoint")

_CHANGED_AFTER = (
    "Weights change after optimizer.step (clipped, or averaged into a kept model): checkpoints of "
    "--checkpoint have them as the step left them. nbdist.save() at the end of the loop's body "
    "has them as they are then."
)


class Rhythm:
    """Which optimizer's step ends an iteration: the last before one steps again.

    Where one steps again and the other has not ended an iteration in between, the training has come
    to another loop, and which step ends that is learned from its first two iterations.
    """

    def __init__(self) -> None:
        self._seen: list[ref[Optimizer]] = []  # since the last end of an iteration
        self._closer: ref[Optimizer] | None = None

    def closes(self, optimizer: Optimizer) -> bool:
        """Note a step, and return whether an iteration ends with it."""
        if any(one() is optimizer for one in self._seen):
            self._closer = self._seen[-1] if self._closer is None else None
            self._seen.clear()
        self._seen.append(ref(optimizer))
        ends = self._closer is not None and self._closer() is optimizer
        if ends:
            self._seen.clear()
        return ends


def best_interval(cost_s: float, step_s: float, failure_s: float = FAILURE_S) -> int:
    """Return after how many steps to save, so that saving and steps made again cost least.

    Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly (2006):
    the square root of twice the cost of a checkpoint times the time between faults.

    Args:
        cost_s: How long training stands still for one.
        step_s: How long a step takes.
        failure_s: Between two faults.
    """
    return max(1, round(math.sqrt(2 * cost_s * failure_s) / max(step_s, 1e-6)))


def failure_s(faults: int, seconds: float) -> float:
    """Return the seconds between two faults, of which so many were seen in so long a session.

    A day with one fault counts as seen before: the mean of a rate whose prior is that (a gamma
    distribution of shape 1), so that neither a quiet hour nor one early fault says much.
    """
    return (FAILURE_S + seconds) / (1 + faults)


def advice(every: int, cost_s: float, step_s: float, faults: int, seconds: float) -> str:
    """Return what is said of an interval that is far from the one that costs least, or nothing.

    Args:
        every: The steps between two checkpoints.
        cost_s: How long training stands still for one.
        step_s: How long a step takes.
        faults: As of `failure_s`.
        seconds: Likewise.
    """
    between_s = failure_s(faults, seconds)
    best = best_interval(cost_s, step_s, between_s)
    if 1 / 3 <= best / every <= 3:
        return ""
    rate = "one fault a day"
    if faults:
        rate = (
            f"a fault every {figure(between_s / 3600)} h (this session has seen {faults} in "
            f"{figure(seconds / 3600)} h; one a day was assumed before)"
        )
    return (
        f"At {rate}, a checkpoint every {best:,} steps costs least (a step takes "
        f"{figure(step_s)} s, a checkpoint {figure(cost_s)} s of training)."
    )


class Automatic(Component):
    """The checkpoints that the cell which runs saves by itself, and from which it goes on."""

    def __init__(self) -> None:
        self._asked: CheckpointEvery | None = None
        self._rhythm = Rhythm()
        self._may_go_on = False  # the cell is run again, and none of its loops has begun
        self._continues = False  # the cell, from a checkpoint
        self._failed = ""
        self._is_warned = False  # of checkpoints that were not written
        # By the step of the newest, with their versions.
        self._left: list[tuple[torch.Tensor, int]] = []
        self._changed_after = False
        self._restored = 0  # of `save.here.restores`, before the cell
        self._began_at = self._cell_began_at = 0.0
        self._steps = 0

    def install(self) -> None:
        """Be called at each boundary and before each loop. Once a process."""
        step_state.here().then(self._at_boundary)
        position.here.before_pass = self._before_pass
        sync_state.here.keep_shapes(save.here.has_saved)

    def cell_began(self, start: CellStart) -> None:
        """Begin a cell, which saves by itself or does not."""
        self._asked = start.saves
        self._is_warned = self._changed_after = self._continues = False
        self._left.clear()
        self._cell_began_at = time.monotonic()
        leaving.cell_began(saves=self._asked is not None)
        self._rhythm, self._failed, self._began_at, self._steps = Rhythm(), "", 0.0, 0
        self._may_go_on = self._asked is not None and start.repeat is not Repeat.NO
        self._restored = save.here.restores

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Return what is to be said of the interval, where the cell went well, and of failures."""
        save.here.tell()
        said = [self._failed, _CHANGED_AFTER if self._changed_after else ""]
        count, blocked_s = save.here.blocked()
        asked, now = self._asked, time.monotonic()
        if cell.has_succeeded and asked is not None and count and self._steps > 1:
            step_s = max(0.0, now - self._began_at - blocked_s) / self._steps
            seconds = asked.session_s + now - self._cell_began_at
            said.append(advice(asked.steps, blocked_s / count, step_s, asked.faults, seconds))
        return tuple(filter(None, said))

    def continues(self) -> bool:
        """Return whether the cell goes on from a checkpoint, restored by it or for it."""
        return self._continues or save.here.restores > self._restored

    # -- saving

    def _at_boundary(self, optimizer: Optimizer, steps: int) -> None:
        if self._asked is None or not self._rhythm.closes(optimizer):
            return
        self._began_at = self._began_at or time.monotonic()
        self._steps += 1
        self._warn(save.here.first_failure())
        is_last = leaving.at_boundary()
        if not is_last and steps % self._asked.steps:
            return
        try:
            saving = self._save(optimizer)
            if is_last:
                leaving.saved(saving)
        except Exception as error:
            if group.was_released(error):
                return  # a fault elsewhere: this rank will hear of it at its next collective
            why = (
                error if isinstance(error, NBDistError) else folder.reason(error, "The checkpoint")
            )
            self._failed = save.not_written(steps, why)
            self._warn(self._failed)
            if is_last:
                leaving.saved(None, self._failed)
            _log.exception("The checkpoint of step %d was not written", steps)

    def _save(self, optimizer: Optimizer) -> Saving:
        saving, training = save.here.begin(training_state.of_cell, None, None, 3, is_automatic=True)
        moment = rest.moment(training)
        save.here.tell_later(saving, lambda: rest.facts_of(training, moment))
        counted = step_state.here().steps
        # Whichever steps next: a discriminator does so long before its generator.
        for one in {optimizer, *training.optimizers}:
            due = counted.setdefault(one, step_state.OptimizerSteps()).before_next
            if self._tell not in due:  # one that has not stepped since the last save
                due.append(self._tell)
        self._left[:] = [
            (tensor, tensor._version)
            for model in training.models
            for tensor in model.module.parameters()
        ]
        return saving

    def _tell(self, _optimizer: Optimizer) -> None:
        """Tell what was read when the next step begins, and see what changed since the last one."""
        save.here.tell()
        moved = any(one._version != was for one, was in self._left)
        self._changed_after = self._changed_after or moved
        self._left.clear()

    def _warn(self, said: str) -> None:
        """Say at once, and once a cell, that it trains without the checkpoints asked for."""
        if said and not self._is_warned:
            self._is_warned = True
            if dist.get_rank() == 0:
                print(f"{said} Training goes on without it.", flush=True)

    # -- going on

    def _before_pass(self) -> None:
        self._go_on()
        resume.here.say_position()

    def _go_on(self) -> None:
        """Go on from the newest checkpoint of the cell, where what it trained is gone."""
        if not self._may_go_on:
            return
        assert self._asked is not None
        self._may_go_on, since = False, self._asked.since
        does_itself = save.here.restores > self._restored
        if does_itself:
            resume.here.forget_repeated()
        elif not any(together(_is_lost)):
            return
        place = each(lambda: CheckpointFolder(place_of(None)))
        found = from_rank_0(lambda: saved.newest_since(place, since), place.url)
        if found is None:
            return
        if does_itself:
            _tell_unused(place.folder(found.name), found)
        else:
            restore.go_on_from(place, found, repeats=True, among=step_state.here().made() or None)
            resume.here.continues_restored()
            self._continues = True


def _tell_unused(folder: str, found: Chosen) -> None:
    """Say that a cell has restored what is older than its newest checkpoint."""
    if found.commit.saved_at > save.here.restored_at and dist.get_rank() == 0:
        print(
            f"This cell's newest checkpoint, {folder}, is not used: the cell itself has restored "
            "an older one. To continue from the newest, have it call "
            "nbdist.restore(missing_ok=True) or nbdist.restore(NAME)."
        )


def _is_lost() -> bool:
    """Return whether what the cell trains is made again, or refused."""
    training = training_state.find(step_state.here().made() or None)
    if sync_state.here.are_refused([m.module for m in training.models], training.optimizers):
        return True
    return not resume.here.continues_with(training.optimizers)


class Leaving:
    """The save that a rank makes before its host leaves, in the cell that runs.

    A host is told to leave: all ranks save after the same step, and the notebook ends the cell.

    1. `hold`: from its next boundary on, a rank stands still. It answers how many it has passed.
    2. `go_on_to` the highest of these and one: no rank is beyond it, and each can get there, since
       who stands still before it goes on. There all save together.
    3. `outcome`, until it is written everywhere. The notebook then interrupts the cell.

    Threads: `at_boundary`, `saved` and `cell_began` on the main one, the rest on the control
    thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_held = self._saves = False
        self._passed = 0  # boundaries, in this cell
        self._target: int | None = None
        self._saving: Saving | None = None
        self._error = ""

    def cell_began(self, *, saves: bool) -> None:
        """Begin a cell, which saves by itself or does not."""
        with self._changed:
            self._is_held, self._saves, self._passed, self._target = False, saves, 0, None
            self._saving, self._error = None, ""

    def hold(self) -> dict[str, Any]:
        """Stand still at the next boundary; return `passed` and whether the cell `saves`."""
        halt.here.end()  # a rank that is paused comes to no boundary
        with self._changed:
            self._is_held = self._saves
            return {"passed": self._passed, "saves": self._saves}

    def go_on_to(self, boundary: int | None) -> None:
        """Go on to this boundary and save there; None: to the end, without saving."""
        with self._changed:
            self._target = boundary
            self._is_held = boundary is not None
            self._changed.notify_all()

    def outcome(self) -> dict[str, Any]:
        """Return whether it `is_over`, and `step` and `folder` of what is saved, or the `error`."""
        saving = self._saving
        if self._error:
            return {"is_over": True, "error": self._error}
        if saving is None or not saving.is_done:
            return {"is_over": False}
        error = "" if saving.error is None else saving.error.what
        return {"is_over": True, "error": error, "step": saving.step, "folder": str(saving.folder)}

    def at_boundary(self) -> bool:
        """Count a boundary, and stand still where that is asked; return whether to save now.

        Raises:
            CheckpointError: It is beyond the boundary at which the others wait for it.
        """
        with self._changed:
            self._passed += 1
            deadline = time.monotonic() + _MOST_S
            while self._is_held and self._target is None:
                if time.monotonic() > deadline:
                    self._is_held = False
                self._changed.wait(0.1)  # signals are heard in between
            if not self._is_held or self._target is None or self._passed < self._target:
                return False
            self._is_held = False
            if self._passed > self._target:
                raise CheckpointError(
                    "The training was not saved before its hosts leave.",
                    why=f"this rank was not answered for {_MOST_S:.0f} s, and has passed the step "
                    "after which all were to save",
                    do="run the cell again: it continues from its newest checkpoint",
                )
            return True

    def saved(self, saving: Saving | None, error: str = "") -> None:
        """Note what has been begun, or why it was not."""
        self._saving, self._error = saving, error


leaving = Leaving()
here = Automatic()
