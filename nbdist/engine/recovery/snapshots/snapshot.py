"""Snapshots in memory: what a fault takes steps apart, and no rank has twice, goes back together.

Of sharded units, and of models that ranks train apart (local SGD).

Taken at a boundary, and by all ranks at the same one: before a sharded unit's first step (by a rank
that a fault has kept from it, when ranks compare), after it, and then when its lowest rank says so.
That rank looks at its own clock (at most every 30 s, and so that snapshots take no more than 1 % of
the time) and writes the step at which the next one is due into the store, far enough ahead for the
others, which look there once a second. Who comes too late has no snapshot of that step, which is
found out when snapshots are compared (`decide.py`).

The one before is kept until two more steps are made: by then no rank can have lost the step of the
newest. Ranks that train apart take theirs where all are equal, at the end of a round, and keep the
one before for a round more, by which one rank may be ahead.

Where peers keep snapshots (`peers`), those of what is cut are taken every K steps instead, counted
from the first step and from each recovery, the same on all ranks. The two newest are kept,
here and at the peer. Main thread, but `status`.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.group import group, state
from nbdist.engine.layout import memory
from nbdist.engine.recovery import follow, model_state, wrapped_models
from nbdist.engine.recovery.decide import Steps
from nbdist.engine.recovery.snapshots import peers, snapshot_schedule
from nbdist.engine.recovery.snapshots.saved import Saved, metas_of
from nbdist.engine.steps import step_state
from nbdist.engine.steps.optimizer_wrapper import ApartWrapper
from nbdist.shared.wire import CellStart

SETTLED_AFTER = 2  # steps after which no rank can have lost the one of a snapshot

_log = logging.getLogger("nbdist.snapshot")


@dataclass(slots=True)
class _Snapshot:
    steps: Steps  # of the optimizers
    at: float
    frame: dict[str, Any]
    tensors: list[torch.Tensor]
    mark: step_state.StepState | None
    turn: int = 0
    follows: follow.Kept | None = None  # known when all that belongs to the step is done

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass
class _Series:
    """The snapshots of one sharded unit."""

    key: str
    is_leader: bool
    kept: deque[_Snapshot] = field(default_factory=lambda: deque(maxlen=2))
    kept_at_step: int = 0  # of the optimizer, when the newest was taken
    target: int | None = None  # step of the next one
    next_at: float = 0.0
    polled_at: float = 0.0
    last_step_at: float = 0.0
    step_s: float = math.inf
    # Of a unit whose ranks train apart; it is the key of `_series`, which must not keep it alive.
    reference: "ref[ApartWrapper] | None" = None
    refused: str | None = None
    is_sent: bool = False  # to a peer
    next_step: int = 0  # at which the next one is sent

    @property
    def wrapper(self) -> ApartWrapper | None:
        """The wrapper of a unit whose ranks train apart, while it is alive."""
        return None if self.reference is None else self.reference()


_NOT_KNOWN = _Series("", is_leader=False)


class Snapshots(Component):
    """The snapshots that this rank keeps."""

    def __init__(self, free_bytes: Callable[[], int] = memory.free_bytes) -> None:
        self._series: WeakKeyDictionary[torch.optim.Optimizer, _Series | None] = WeakKeyDictionary()
        # Replaced, never changed: any thread may read it.
        self._status: dict[str, Any] | None = None
        self._notices: list[str] = []  # refusals that have not been reported
        self._free_bytes = free_bytes

    def before_any_step(self) -> None:
        """Take snapshots of what is sharded and has never stepped, before a cell's first step.

        A fault may take its ranks a step apart already. All have one mark, so that what goes back
        together finds the loader where the cell began.
        """
        here = step_state.here()
        if here.has_stepped():
            return
        for unit in wrapped_models.find():
            if unit.kind == "sharded" and not any(o in here.steps for o in unit.optimizers):
                series = self._series_for(unit.optimizers[0])
                if series is not None and not series.kept:
                    # Of the end of the turn before: in this one its first step is to come.
                    self._take(unit.optimizers[0], series, 0, here.followers.turn - 1)

    def at_boundary(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Take a snapshot if one is due. Called at each boundary with the optimizer's steps."""
        series = self._series_for(optimizer)
        if steps == 2:
            self._drop_unused()
        if series is None:
            return
        if series.is_sent:
            self._send_if_due(optimizer, series, steps)
            return
        now = time.monotonic()
        series.step_s = snapshot_schedule.shortest(series.step_s, now - series.last_step_at)
        series.last_step_at = now
        if len(series.kept) == 2 and steps >= series.kept_at_step + _settled_after(series):
            series.kept.popleft()
        if steps == 1 or steps == series.target:
            series.target = None
            self._take(optimizer, series, steps)
            return
        try:
            (_lead if series.is_leader else _follow)(series, steps, now)
        except Exception as error:
            if not group.was_released(error):
                raise
            # A fault elsewhere: this rank has let go, and will hear of it at its next collective.

    def held(self, unit: wrapped_models.Unit) -> list[tuple[Steps, float]]:
        """Return the steps of the unit's snapshots here and their ages in s, newest first."""
        series = self._series_of(unit)
        now = time.monotonic()
        return (
            [] if series is None else [(one.steps, now - one.at) for one in reversed(series.kept)]
        )

    def turns(self, unit: wrapped_models.Unit) -> tuple[int, ...]:
        """Return the turns in which these snapshots were taken."""
        series = self._series_of(unit)
        return () if series is None else tuple(one.turn for one in reversed(series.kept))

    def put_back(
        self, unit: wrapped_models.Unit, steps: Steps
    ) -> tuple[step_state.StepState | None, follow.Kept | None]:
        """Bring the unit back to its snapshot of `steps`.

        Returns:
            The boundary at which it was taken, and what followed that step, where this is known.

        Raises:
            LookupError: There is none.
        """
        series = self._series_of(unit)
        chosen = None
        if series is not None:
            chosen = next((one for one in series.kept if one.steps == steps), None)
        if series is None or chosen is None:
            raise LookupError(f"this rank has no snapshot of {unit.name} at {steps}")
        model_state.put_back(unit, chosen.frame, chosen.tensors)
        series.target, series.kept_at_step = None, max(steps)
        for newer in [one for one in series.kept if sum(one.steps) > sum(steps)]:
            series.kept.remove(newer)  # of steps that are made again, perhaps otherwise
        return chosen.mark, chosen.follows

    def forget_schedules(self) -> None:
        """Drop what was announced before a fault: not all ranks may have heard of it."""
        for series in self._series.values():
            if series is not None:
                series.target, series.next_step = None, 0

    def install(
        self, unit: wrapped_models.Unit, saved: Saved, tensors: list[torch.Tensor]
    ) -> step_state.StepState:
        """Give a unit of a replacement rank what a peer has kept of it, and keep that here, too.

        Returns:
            The boundary at which it was taken, but for what others keep of it.

        Raises:
            LookupError: It has other shapes than the unit.
        """
        live = model_state.read(unit, buffers=True)[1][: len(unit.parameters)]
        if [tensor.shape for tensor in live] != [tensor.shape for tensor in tensors[: len(live)]]:
            raise LookupError(f"what a peer has kept of {unit.name} has other shapes")
        model_state.put_back(unit, saved.frame, tensors)
        series = next((_new_series(o) for o in unit.optimizers), None)
        if series is not None:
            series.kept.append(_Snapshot(saved.steps, time.monotonic(), saved.frame, tensors, None))
            series.kept_at_step = max(saved.steps)
            self._series[unit.optimizers[0]] = series
        mark = saved.random
        assert isinstance(mark, step_state.StepState)
        return mark

    def cell_began(self, start: CellStart) -> None:
        """Look again at what every optimizer trains."""
        for optimizer, series in list(self._series.items()):
            if series is None:
                del self._series[optimizer]

    def forget(self) -> None:
        """Drop every snapshot: the training has been brought to where none of them was taken."""
        self._series.clear()

    def status(self) -> dict[str, Any] | None:
        """Return the newest snapshot's `step`, `age_s` and `bytes`, or why it is `refused`.

        Any thread. None: no unit on this rank needs one.
        """
        known = self._status
        if known is None or "refused" in known:
            return known
        return {
            "step": known["step"],
            "age_s": time.monotonic() - known["at"],
            "bytes": known["bytes"],
        }

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Return what is to be said of snapshots."""
        taken = tuple(self._notices)
        self._notices.clear()
        return taken

    def _drop_unused(self) -> None:
        """Drop the snapshots of what has not stepped while others went on: the loader has, too."""
        for series in self._series.values():
            if series is not None and len(series.kept) == 1 and not any(series.kept[0].steps):
                series.kept.clear()

    def _series_for(self, optimizer: torch.optim.Optimizer) -> _Series | None:
        """Return the series of an optimizer's unit, new at first; None where it needs none."""
        series = self._series.get(optimizer, _NOT_KNOWN)
        if series is _NOT_KNOWN:
            series = self._series[optimizer] = _new_series(optimizer)
        return series

    def _series_of(self, unit: wrapped_models.Unit) -> _Series | None:
        return next((s for o in unit.optimizers if (s := self._series.get(o)) is not None), None)

    def _send_if_due(self, optimizer: torch.optim.Optimizer, series: _Series, steps: int) -> None:
        """Take a snapshot and send it to the peer, where the next one is due."""
        if steps >= series.next_step:
            self._send(optimizer, series, steps)
        if peers.must_wait(steps, series.kept_at_step, peers.here.every()):
            peers.here.wait()

    def _send(
        self, optimizer: torch.optim.Optimizer, series: _Series, steps: int, turn: int | None = None
    ) -> None:
        peers.here.wait()  # the older one's memory is used again
        self._take(optimizer, series, steps, turn)
        if not series.next_step:
            peers.here.wait()  # the first, and after a recovery: a peer may hold nothing yet
        series.next_step = steps + peers.here.every()

    def _take(
        self, optimizer: torch.optim.Optimizer, series: _Series, steps: int, turn: int | None = None
    ) -> None:
        began = time.monotonic()
        turn = step_state.here().followers.turn if turn is None else turn
        unit = wrapped_models.unit_of(optimizer)
        if unit is None:
            return
        frame, live = model_state.read(unit, buffers=True)
        if steps == 0:  # its forward has moved running statistics already
            live = step_state.here().at_boundary(live)
        size = sum(tensor.nbytes for tensor in live)
        # Of what is sent there are two here, and two at the peer.
        count = 4 if _is_first_sent(series, steps) else 1
        used_again = _take_oldest_memory(series)
        if self._is_refused(series, 0 if used_again else size * count, began):
            return
        copies = _copied(live, used_again)
        if any(tensor.is_cuda for tensor in live):
            torch.cuda.synchronize()
        made = unit.steps()[: len(unit.optimizers)]
        # The frame holds plain values that optimizers replace, not change.
        taken = _Snapshot(made, began, frame, copies, step_state.here().last, turn)
        step_state.here().followers.look_at_weights(optimizer)
        series.kept.append(taken)
        series.kept_at_step = steps
        series.next_at = snapshot_schedule.next_at(time.monotonic(), time.monotonic() - began)
        self._status = {"step": steps, "at": began, "bytes": size}
        self._complete_at_next_turn(optimizer, series, unit, taken, has_stepped=steps > 0)

    def _is_refused(self, series: _Series, wanted: int, began: float) -> bool:
        """Return whether there is no memory for `wanted` bytes; report it once."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        why = snapshot_schedule.refusal(wanted, self._free_bytes(), here)
        if why is not None:
            if series.refused is None:
                _log.warning(why)
                self._notices.append(why)
            self._status = {"refused": why}
            series.next_at = snapshot_schedule.next_at(began, 0.0)
        series.refused = why
        return why is not None

    def _complete_at_next_turn(
        self,
        optimizer: torch.optim.Optimizer,
        series: _Series,
        unit: wrapped_models.Unit,
        taken: _Snapshot,
        *,
        has_stepped: bool,
    ) -> None:
        """Add to a snapshot what the loop does after the step, and send it to the peer."""
        followers = step_state.here().followers
        is_sent = series.is_sent and has_stepped
        # Where a loop is known to write weights after the step, the peer keeps what it has written.
        is_early = is_sent and not followers.writes_weights(optimizer)
        if is_early:
            _offer(unit, taken)
        held = ref(optimizer)  # held by nothing here

        def read() -> None:
            living = held()
            if living is None or not torch.distributed.is_initialized():
                return  # the program has destroyed the group, and with it what the model stands on
            unit = wrapped_models.unit_of(living)
            if unit is not None:
                wrote = followers.wrote_weights(living)
                if wrote:
                    _copy_weights(unit, taken)
                if is_sent and (wrote or not is_early):
                    _offer(unit, taken)
                taken.frame["options"] = model_state.read_options(unit)
                taken.follows = follow.keep()
                if has_stepped and series.reference is None:
                    taken.mark = step_state.here().last
                    self._take_others(taken.turn)

        followers.at_next_turn(read)

    def _take_others(self, turn: int) -> None:
        """Take snapshots of all else that has stepped, as a turn ends in which one was taken.

        What is trained in the same turns goes back to the same turn.
        """
        here = step_state.here()
        for optimizer in here.stepped():
            series = self._series.get(optimizer)
            if series is None or series.reference is not None or not series.kept:
                continue
            if series.kept[-1].turn != turn:
                take = self._send if series.is_sent else self._take
                take(optimizer, series, here.steps[optimizer].whole, turn)


def _new_series(optimizer: torch.optim.Optimizer) -> _Series | None:
    unit = wrapped_models.unit_of(optimizer)
    if unit is None or unit.kind == "replicated":
        return None
    key = f"snapshot/{unit.identity}/{'-'.join(map(str, unit.ranks))}"
    return _Series(
        key,
        is_leader=unit.ranks[0] == torch.distributed.get_rank(),
        last_step_at=time.monotonic(),
        reference=ref(optimizer) if isinstance(optimizer, ApartWrapper) else None,
        is_sent=peers.here.every() > 0 and unit.can_be_restored,
    )


def _is_first_sent(series: _Series, steps: int) -> bool:
    """Return whether a snapshot now is the first of a step that a peer is to keep."""
    return series.is_sent and steps > 0 and not any(any(one.steps) for one in series.kept)


def _take_oldest_memory(series: _Series) -> list[torch.Tensor]:
    """Drop the older of two snapshots that a peer keeps, too; return its tensors for the next."""
    if not series.is_sent or len(series.kept) < 2:
        return []
    oldest = series.kept.popleft()
    # One of no step is without optimizers' states.
    return oldest.tensors if any(oldest.steps) else []


def _settled_after(series: _Series) -> int:
    """Return after how many steps no rank can have lost the one of a snapshot."""
    ahead = 0 if series.wrapper is None else series.wrapper.between_meetings()
    return SETTLED_AFTER + ahead


def _lead(series: _Series, steps: int, now: float) -> None:
    if series.target is None and now >= series.next_at:
        ahead = snapshot_schedule.margin(series.step_s)
        if series.wrapper is not None:
            # The others may be ahead by a round, and must hear of it before they are there.
            ahead = series.wrapper.next_meeting(ahead + series.wrapper.between_meetings())
        series.target = steps + ahead
        state.here.store().set(series.key, str(series.target))


def _follow(series: _Series, steps: int, now: float) -> None:
    if series.target is not None and series.target > steps:
        return
    if now < series.polled_at + snapshot_schedule.POLL_S:
        return
    series.polled_at = now
    store = state.here.store()
    if store.check([series.key]):
        series.target = int(store.get(series.key))


def _offer(unit: wrapped_models.Unit, taken: _Snapshot) -> None:
    """Send a snapshot to the peer, and before it, once, what no optimizer changes."""
    fixed = [wrapped_models.local(tensor).detach() for tensor in unit.fixed]
    version = peers.here.offer_fixed(unit.identity, unit.fixed, lambda: _copied(fixed, []))
    mark = None if taken.mark is None else taken.mark._replace(others=())
    metas = metas_of(taken.tensors)
    offered = Saved(taken.steps, time.time(), taken.frame, metas, mark, version)
    peers.here.offer(unit.identity, offered, taken.tensors)


def _copy_weights(unit: wrapped_models.Unit, taken: _Snapshot) -> None:
    """Copy weights once more that the loop has written after the step, as clipping does."""
    peers.here.wait()  # they may be on their way to the peer
    live = model_state.read_weights(unit)
    _copied(live, taken.tensors[: len(live)])
    if any(tensor.is_cuda for tensor in live):
        torch.cuda.synchronize()


def _copied(live: list[torch.Tensor], used_again: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies on the CPU, in the memory of `used_again` where shapes and dtypes are those."""
    metas = metas_of(live)
    copies = used_again if metas == metas_of(used_again) else []
    if not copies:
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in live]
    for copy, tensor in zip(copies, live, strict=True):
        copy.copy_(tensor, non_blocking=True)
    return copies


here = Snapshots()
