"""What all ranks together write of one checkpoint: agreed on before anything is copied.

Main thread, all ranks. The plan of the save before is used again where nothing has changed: ranks
then talk once.
"""

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nbdist.engine.checkpoint import manifest
from nbdist.engine.checkpoint.agreement import (
    exchanged,
    from_rank_0,
    one_error,
    refuse_different,
    refuse_others,
    together,
)
from nbdist.engine.checkpoint.folder import CheckpointFolder, reason
from nbdist.engine.checkpoint.training_state import Training
from nbdist.engine.compat.checkpoints.torch_checkpoint import (
    Spread,
    WritePlan,
    WritePlanner,
    Writer,
)
from nbdist.shared.errors import NBDistError

_log = logging.getLogger("nbdist.checkpoint")


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
    """What this rank would save: the request, its training and the tensors of that.

    `steady` are tensors that nothing but a step of the optimizers is to change, by name.
    """

    request: SaveRequest
    training: Training
    planner: WritePlanner
    steady: Mapping[str, torch.Tensor]


class AgreedSave(NamedTuple):
    """What this rank has prepared and will write; the save's key in the store, and its folder."""

    prepared: PreparedSave
    plan: WritePlan
    key: str
    folder: str


class _SaveFacts(NamedTuple):
    """What a rank tells the others of what it has prepared."""

    is_known: bool
    key: str
    asked: str
    training: str
    whole: str
    folder: str
    error: NBDistError | None  # of making the folder


class _NewFolder:
    """The folder of a save, which rank 0 makes before it is sure that all ranks save."""

    def __init__(self) -> None:
        self._made: tuple[CheckpointFolder, str] | None = None

    def make(self, request: SaveRequest, total_bytes: int) -> str:
        """Make it for so many bytes, and return its name."""
        name = manifest.name_of(request.step, request.place.names())
        request.place.begin(name, total_bytes)
        self._made = request.place, name
        return name

    def delete(self) -> None:
        """Delete it, where it has been made: no rank has written into it."""
        if self._made is not None:
            delete(*self._made)


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


def agree(prepare: Callable[[], PreparedSave]) -> AgreedSave:
    """Return what this rank is to write, and where, in a new folder. Collective.

    Args:
        prepare: Returns what is to be saved here; runs no collective.

    Raises:
        CheckpointError: It cannot be written there; the same on all ranks.
        UsageError: Ranks name different places, or ask for different parts of a training.
    """
    folder = _NewFolder()
    try:
        return _agreed(prepare, folder)
    except BaseException:
        folder.delete()
        raise


def _agreed(prepare: Callable[[], PreparedSave], folder: _NewFolder) -> AgreedSave:
    prepared, every = exchanged(prepare, lambda mine: _told_of(mine, folder))
    refuse_others([one.asked for one in every], "nbdist.save")
    refuse_different([(one.training, one.whole) for one in every], "nbdist.save")
    first = every[0]
    if first.error is not None:
        raise one_error({0: first.error}, 1) from first.error
    plan = remembered.plan
    if plan is None or not all(one.is_known for one in every):
        plan = _planned(prepared)
    request, total = prepared.request, plan.total_bytes
    name = first.folder or from_rank_0(lambda: folder.make(request, total), request.place.url)
    remembered.asked = request.place.asked
    return AgreedSave(prepared, plan, first.key, name)


def _told_of(prepared: PreparedSave, folder: _NewFolder) -> _SaveFacts:
    """Return what the others are told; rank 0 makes the folder where the plan is known."""
    request, training = prepared.request, prepared.training
    plan, name, error = remembered.plan_of(prepared.planner), "", None
    # In another place a folder would be left where the other ranks name yet another.
    is_there = request.place.asked == remembered.asked
    if plan is not None and is_there and dist.get_rank() == 0:
        try:
            name = folder.make(request, plan.total_bytes)
        except Exception as raised:
            error = reason(raised, request.place.url)
    key, place = uuid.uuid4().hex, request.place.asked
    return _SaveFacts(plan is not None, key, place, str(training), training.whole, name, error)


def _planned(prepared: PreparedSave) -> WritePlan:
    """Make a new plan, and remember it. Collective."""
    planner, place = prepared.planner, prepared.request.place
    every = together(lambda: planner.local)
    plan = planner.agree(every, writer_of(place, place.url))
    remembered.local, remembered.plan, remembered.spread = planner.local, plan, planner.spread()
    return plan


def writer_of(place: CheckpointFolder, url: str) -> Writer:
    """Return what writes the files of one checkpoint folder."""
    options = {} if place.is_local else place.options
    return Writer(url, is_local=place.is_local, options=options)


def delete(place: CheckpointFolder, name: str) -> None:
    """Delete the folder of a save that failed; that this fails is logged."""
    try:
        place.delete(name)
    except Exception:
        _log.exception("%s could not be deleted", place.folder(name))
