"""What all ranks together write of one checkpoint: agreed on before anything is copied.

Main thread, all ranks. The plan of the save before is used again where nothing has changed: ranks
then talk once.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nbdist.engine.checkpoint.agreement import (
    from_rank_0,
    one_error,
    refuse_different,
    refuse_others,
    together,
)
from nbdist.engine.checkpoint.folder import CheckpointFolder, reason
from nbdist.engine.compat.torch_checkpoint import Spread, WritePlan, WritePlanner, Writer
from nbdist.shared.errors import NBDistError


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What is to be saved beside the tensors, and what becomes of older checkpoints."""

    place: CheckpointFolder
    step: int
    layouts: Mapping[str, str]
    metric: float | None = None
    keep: int | None = 3
    is_automatic: bool = False


class PreparedSave(NamedTuple):
    """What this rank would save: the request, its tensors, and what it calls its training.

    `training` is a `Training` in words, `whole` what that has by this name. `steady` are tensors
    that nothing but a step of the optimizers is to change, by name.
    """

    request: SaveRequest
    planner: WritePlanner
    training: str
    whole: str
    steady: Mapping[str, torch.Tensor]
    optimizers: Sequence[torch.optim.Optimizer]


Begin = Callable[[SaveRequest, int], str]


class Agreed(NamedTuple):
    """What this rank has prepared and will write; the save's key in the store, and its folder."""

    prepared: PreparedSave
    plan: WritePlan
    key: str
    folder: str


class _Told(NamedTuple):
    """What a rank tells the others of what it has prepared."""

    is_known: bool
    key: str
    asked: str
    training: str
    whole: str
    folder: str
    error: NBDistError | None  # of making the folder


@dataclass
class _Remembered:
    """What the save before has left for the next: where it lies, its plan, room on the CPU."""

    asked: str = ""
    local: bytes = b""
    spread: Spread = field(default_factory=dict)
    plan: WritePlan | None = None
    buffers: dict[Any, torch.Tensor] = field(default_factory=dict)

    def plan_of(self, planner: WritePlanner) -> WritePlan | None:
        """Return the plan before if nothing has changed; a new rank remembers none."""
        is_same = planner.spread() == self.spread or planner.local == self.local
        return self.plan if self.plan is not None and is_same else None


remembered = _Remembered()


def agree(prepare: Callable[[], PreparedSave], begin: Begin) -> Agreed:
    """Return what this rank is to write, and where. Collective.

    Args:
        prepare: Returns what is to be saved here; runs no collective.
        begin: Makes the folder of a save of so many bytes, on rank 0, and returns its name.

    Raises:
        CheckpointError: It cannot be written there; the same on all ranks.
        UsageError: Ranks name different places, or ask for different parts of a training.
    """
    mine: list[PreparedSave] = []

    def tell() -> _Told:
        one = prepare()
        mine.append(one)
        known, place = remembered.plan_of(one.planner), one.request.place
        folder, error = "", None
        # In another place a folder would be left where the other ranks name yet another.
        is_there = place.asked == remembered.asked
        if known is not None and is_there and dist.get_rank() == 0:
            try:
                folder = begin(one.request, known.total_bytes)
            except Exception as raised:
                error = reason(raised, place.url)
        key, is_known = uuid.uuid4().hex, known is not None
        return _Told(is_known, key, place.asked, one.training, one.whole, folder, error)

    told = together(tell)
    refuse_others([one.asked for one in told], "nbdist.save")
    refuse_different([(one.training, one.whole) for one in told], "nbdist.save")
    (prepared,), first = mine, told[0]
    if first.error is not None:
        raise one_error({0: first.error}, 1) from first.error
    plan = remembered.plan
    if plan is None or not all(one.is_known for one in told):
        plan = _planned(prepared)
    place, total = prepared.request.place, plan.total_bytes
    folder = first.folder or from_rank_0(lambda: begin(prepared.request, total), place.url)
    remembered.asked = place.asked
    return Agreed(prepared, plan, first.key, folder)


def _planned(prepared: PreparedSave) -> WritePlan:
    """Plan anew, and remember it. Collective."""
    planner, place = prepared.planner, prepared.request.place
    every = together(lambda: planner.local)
    plan = planner.agree(every, writer_of(place, place.url))
    remembered.local, remembered.plan, remembered.spread = planner.local, plan, planner.spread()
    return plan


def writer_of(place: CheckpointFolder, url: str) -> Writer:
    """Return what writes the files of one checkpoint folder."""
    options = {} if place.is_local else place.options
    return Writer(url, is_local=place.is_local, options=options)
