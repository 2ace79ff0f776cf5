"""`%%distributed --checkpoint every=100`: saved at step boundaries, gone on from after a fault.

A boundary is the end of the last optimizer's step of an iteration. What follows it (a scheduler, an
average of weights) is read when the next step begins. When the cell is run again and what was
trained is lost or made anew, its first loop over a loader goes on from the newest checkpoint of its
own. Main thread.
"""

import logging
import math
import time
from weakref import ref

import torch
import torch.distributed as dist

from nbdist.engine.checkpoint import chosen, folder, leaving, rest, restore, save, training_state
from nbdist.engine.checkpoint.agreement import each, from_rank_0, together
from nbdist.engine.checkpoint.folder import CheckpointFolder
from nbdist.engine.checkpoint.place import place_of
from nbdist.engine.checkpoint.saving import Saving
from nbdist.engine.data import position, resume
from nbdist.engine.group import group
from nbdist.engine.recovery import sync_state
from nbdist.engine.steps import step_state
from nbdist.errors import NBDistError
from nbdist.formatting import figure
from nbdist.wire import CheckpointEvery

FAILURE_S = 24 * 3600.0  # between two faults, where nothing has been seen

Optimizer = torch.optim.Optimizer

_log = logging.getLogger("nbdist.checkpoint")

_CHANGED_AFTER = (
    "Weights change after optimizer.step (clipped, or averaged into a kept model): checkpoints of "
    "--checkpoint have them as the step left them. nbdist.save() at the end of the loop's body "
    "has them as they are then."
)


class Rhythm:
    """Which optimizer's step ends an iteration: the last before one steps again."""

    def __init__(self) -> None:
        self._seen: list[ref[Optimizer]] = []
        self._closer: ref[Optimizer] | None = None

    def closes(self, optimizer: Optimizer) -> bool:
        """Note a step, and return whether an iteration ends with it."""
        if self._closer is None:
            if any(one() is optimizer for one in self._seen):
                self._closer = self._seen[-1]
            else:
                self._seen.append(ref(optimizer))
        return self._closer is not None and self._closer() is optimizer


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


_asked: CheckpointEvery | None = None
_rhythm = Rhythm()
_may_go_on = False  # the cell is run again, and none of its loops has begun
_failed: str = ""
_is_warned = False  # of checkpoints that were not written, in this cell
_left: list[tuple[torch.Tensor, int]] = []  # by the step of the newest, with their versions
_changed_after = False
_restored = 0  # calls of nbdist.restore before the cell
_began_at = _cell_began_at = 0.0
_steps = 0
_goes_on = False  # the cell, from a checkpoint


def install() -> None:
    """Be called at each boundary and before each loop. Once a process."""
    step_state.here().then(_at_boundary)
    position.before_passes(_before_pass)
    sync_state.keep_shapes(save.has_saved)


def begin_cell(asked: CheckpointEvery | None, *, is_retry: bool) -> None:
    """Begin a cell, with what it was asked for; None: it saves nothing by itself."""
    global _asked, _rhythm, _may_go_on, _failed, _restored, _began_at, _steps, _goes_on
    global _cell_began_at, _is_warned, _changed_after
    _is_warned, _changed_after = False, False
    _left.clear()
    _goes_on, _cell_began_at = False, time.monotonic()
    _asked = asked
    leaving.begin_cell(saves=_asked is not None)
    _rhythm, _failed, _began_at, _steps = Rhythm(), "", 0.0, 0
    _may_go_on = _asked is not None and is_retry
    _restored = restore.calls()


def goes_on() -> bool:
    """Return whether the cell goes on from a checkpoint, restored by it or for it."""
    return _goes_on or restore.calls() > _restored


def end_cell(*, has_succeeded: bool) -> tuple[str, ...]:
    """Return what is to be said of the interval, where the cell has succeeded, and of failures."""
    save.tell()
    said = [_failed] if _failed else []
    if _changed_after:
        said.append(_CHANGED_AFTER)
    count, blocked_s = save.blocked()
    if has_succeeded and _asked is not None and count and _steps > 1:
        step_s = max(0.0, time.monotonic() - _began_at - blocked_s) / _steps
        seconds = _asked.session_s + time.monotonic() - _cell_began_at
        said.append(advice(_asked.steps, blocked_s / count, step_s, _asked.faults, seconds))
    return tuple(filter(None, said))


# ---- Saving -------------------------------------------------------------------------------------


def _at_boundary(optimizer: Optimizer, steps: int) -> None:
    global _failed, _began_at, _steps
    if _asked is None or not _rhythm.closes(optimizer):
        return
    _began_at = _began_at or time.monotonic()
    _steps += 1
    _warn(save.first_failure())
    is_last = leaving.at_boundary()
    if not is_last and steps % _asked.steps:
        return
    try:
        saving = _save(optimizer)
        if is_last:
            leaving.saved(saving)
    except Exception as error:
        if group.was_released(error):
            return  # a fault elsewhere: this rank will hear of it at its next collective
        told = error if isinstance(error, NBDistError) else folder.reason(error, "The checkpoint")
        _failed = save.not_written(steps, told)
        _warn(_failed)
        if is_last:
            leaving.saved(None, _failed)
        _log.exception("The checkpoint of step %d was not written", steps)


def _save(optimizer: Optimizer) -> Saving:
    saving, training = save.begin(training_state.of_cell, None, None, 3, is_automatic=True)
    moment = rest.moment(training)
    save.tell_later(saving, lambda: rest.facts_of(training, moment))
    counted = step_state.here().steps
    counted.setdefault(optimizer, step_state.OptimizerSteps()).before_next.append(_tell)
    _left[:] = [
        (tensor, tensor._version)
        for model in training.models
        for tensor in model.module.parameters()
    ]
    return saving


def _tell(_optimizer: Optimizer) -> None:
    """Tell what was read when the next step begins, and see what changed since the last one."""
    global _changed_after
    save.tell()
    _changed_after = _changed_after or any(one._version != was for one, was in _left)
    _left.clear()


def _warn(said: str) -> None:
    """Say at once, and once a cell, that it trains without the checkpoints that were asked for."""
    global _is_warned
    if said and not _is_warned:
        _is_warned = True
        if dist.get_rank() == 0:
            print(f"{said} Training goes on without it.", flush=True)


# ---- Going on -----------------------------------------------------------------------------------


def _before_pass() -> None:
    """Go on from the newest checkpoint of the cell, where what it trained is gone."""
    global _may_go_on, _goes_on
    if not _may_go_on:
        return
    assert _asked is not None
    _may_go_on, since = False, _asked.since
    if restore.calls() > _restored:  # the cell does so itself
        resume.forget_repeated()
        return
    if not any(together(_is_lost)):
        return
    place = each(lambda: CheckpointFolder(place_of(None)))
    found = from_rank_0(lambda: chosen.newest_since(place, since), place.url)
    if found is not None:
        restore.go_on_from(place, found, repeats=True, among=step_state.here().made() or None)
        resume.forget_repeated()
        _goes_on = True


def _is_lost() -> bool:
    """Return whether what the cell trains is made anew, or refused."""
    training = training_state.find(step_state.here().made() or None)
    if sync_state.are_refused([m.module for m in training.models], training.optimizers):
        return True
    return not resume.goes_on_with(training.optimizers)
