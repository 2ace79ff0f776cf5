"""Keep the evidence of steps on disk, where a cell asks for it, and find it again.

Each rank writes its own file as it leaves a step out, and as its cell ends with an error, and tells
the others nothing: one may have died. To be read they come together, and a step that all have made
counts where all have kept it.

Main thread, and the one that steps.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbdist.engine.checks import model_facts
from nbdist.engine.compat import torch_live
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.kernel import agreement
from nbdist.engine.kernel.cost_clock import clocked
from nbdist.engine.layout.layout import layout_of, live_layouts
from nbdist.engine.steps import evidence_file, guard
from nbdist.engine.steps.kept_step import KeptStep
from nbdist.shared.error_text import named
from nbdist.shared.errors import UsageError
from nbdist.shared.text import counted, name_bytes, name_ranks
from nbdist.shared.wire import CellStart

Step = tuple[int, int]  # number of the cell, and in it

_log = logging.getLogger("nbdist.guard")


class KeptEvidence(Component):
    """Writes this rank's evidence while a cell runs that asks for it."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._is_kept = False
        self._failed = ""

    def cell_began(self, start: CellStart) -> None:
        """Write where the cell says, if it does."""
        self._folder = Path(start.evidence) if start.evidence else None
        self._is_kept, self._failed = False, ""

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Write what is kept, if the cell has failed; say where it lies."""
        mine = [one for one in guard.here.evidence.steps if one.cell == cell.number]
        if mine and not cell.has_succeeded:
            self.save(mine)
        folder, self._folder = self._folder, None
        if self._failed:
            yield f"The evidence of this cell's steps is not on disk: {self._failed}."
        elif self._is_kept:
            yield (
                f"Evidence, which may hold your samples, is kept for {evidence_file.DAYS} days in "
                f"{folder}, for this account alone: %dist replay --from last."
            )

    @clocked("guard")
    def save(self, steps: Sequence[KeptStep]) -> None:
        """Write the steps that are kept now. Training goes on where it fails."""
        if self._folder is None:
            return
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # copies may be on their way
            content = {
                "format": evidence_file.FORMAT,
                "world": dist.get_world_size(),
                "layout": _newest_layout(),
                "steps": [evidence_file.pack(one) for one in steps],
            }
            evidence_file.write(self._folder, dist.get_rank(), content)
            self._is_kept, self._failed = True, ""
        except Exception as error:
            self._failed = named(error).rstrip(".")
            _log.exception("The evidence of a step is not on disk")


@dataclass(frozen=True, slots=True)
class KeptFile:
    """What a rank says of its file.

    Attributes:
        world: Of how many ranks it is.
        layout: Under which its model was; "" without one.
        steps: By cell and number, whether all ranks have made it, or left it out.
        misfit: Why no model of this rank is the one it is of; "" where one is.
        size_bytes: On disk.
    """

    world: int
    layout: str
    steps: Mapping[Step, bool]
    misfit: str
    size_bytes: int


def read(place: str) -> tuple[list[KeptStep], str]:
    """Return the steps that this rank has kept in a folder, and a sentence about it. Collective.

    Args:
        place: Of the folder; `last` in the folder of them stands for the newest.

    Raises:
        UsageError: It is not complete, or not of the models and ranks of now; the same on all.
    """
    folder = agreement.from_rank_0(lambda: evidence_file.find(Path(place)))
    mine: list[KeptStep] = []

    def look() -> KeptFile | None:
        content = evidence_file.read(folder, dist.get_rank())
        if content is None:
            return None
        why = ""
        for kept in content["steps"]:
            model, other = _model_of(kept["form"])
            why = why or other
            layout = None if model is None else layout_of(model)
            mine.append(evidence_file.unpack(kept, model, _optimizer_of(model), layout))
        steps = {(one.cell, one.step): one.is_of_all for one in mine}
        size = (folder / f"rank{dist.get_rank()}.pt").stat().st_size
        return KeptFile(content["world"], content["layout"], steps, why, size)

    every = agreement.together(look, kind=UsageError)
    whole = complete(str(folder), every, _newest_layout())
    return [one for one in mine if (one.cell, one.step) in whole], said(str(folder), every, whole)


def complete(folder: str, every: Sequence[KeptFile | None], layout: str) -> frozenset[Step]:
    """Return the steps that can be looked into, by cell and number.

    Args:
        folder: Where the files lie.
        every: By rank; None where it has none.
        layout: The newest of now.

    Raises:
        UsageError: There are none, or models or ranks are others now.
    """
    files = {rank: one for rank, one in enumerate(every) if one is not None}
    if not files:
        raise UsageError(
            f"{folder} has no file of any of these ranks.",
            do="%dist replay --from a folder that %%distributed --keep has named",
        )
    first = next(iter(files.values()))
    if first.world != len(every):
        raise UsageError(
            f"The evidence in {folder} is of {counted(first.world, 'rank')}, and here "
            f"{'is' if len(every) == 1 else 'are'} {len(every)}.",
            why="a forward runs again as the ranks ran it together",
            do=f"%dist scale {first.world}, build the model again, then %dist replay --from",
        )
    lacking = _lacking(every)
    whole = frozenset(step for step, ranks in lacking.items() if not ranks)
    if not whole:
        without = lacking[max(lacking)]
        raise UsageError(
            f"The evidence in {folder} is not complete: of its newest step there is nothing of "
            f"{name_ranks(without)}.",
            why="a forward runs on all ranks or on none, and these ended or could not write before",
            do="%dist replay --from another folder, or train with --keep again",
        )
    if other := {rank: one.misfit for rank, one in files.items() if one.misfit}:
        here_is = f"the newest layout here is {layout!r}" if layout else "there is none here"
        was = f"its layout was {first.layout!r}, and {here_is}; " if first.layout else ""
        raise UsageError(
            f"No model of {name_ranks(other)} is the one whose step is kept in {folder}.",
            why=(was if first.layout != layout else "") + next(iter(other.values())),
            do="run the cell that builds it, with the same layout, then %dist replay --from",
        )
    return whole


def said(folder: str, every: Sequence[KeptFile | None], whole: Collection[Step]) -> str:
    """Return where the steps lie, what they take, and which newer one cannot be looked into."""
    size = max(one.size_bytes for one in every if one is not None)
    text = f"Kept in {folder}, {name_bytes(size)} a rank."
    lacking = _lacking(every)
    if (newest := max(lacking)) not in whole:
        text += f" Of step {newest[1]} there is nothing of {name_ranks(lacking[newest])}."
    return text


def _lacking(every: Sequence[KeptFile | None]) -> dict[Step, list[int]]:
    """Return, of each step, the ranks that have made it and have not kept it."""
    found: dict[Step, list[int]] = {}
    for one in every:
        for step, is_of_all in {} if one is None else one.steps.items():
            has_it = [kept is not None and step in kept.steps for kept in every]
            found[step] = [rank for rank, has in enumerate(has_it) if is_of_all and not has]
    return found


def _newest_layout() -> str:
    return next((layout.name for layout in reversed(live_layouts())), "")


def _optimizer_of(model: nn.Module | None) -> Optimizer | None:
    """Return the newest living optimizer that trains a model."""
    living = reversed(torch_live.here.live(Optimizer)) if model is not None else ()
    found = [one for one in living if model_facts.model_of(one) is model]
    # Beside a ZeroRedundancyOptimizer the one inside it lives.
    inner = {id(getattr(one, "optim", None)) for one in found}
    return next((one for one in found if id(one) not in inner), None)


def _model_of(form: Mapping[str, Any] | None) -> tuple[nn.Module | None, str]:
    """Return the newest living model that has this form, or why none does."""
    if form is None:
        return None, ""
    trained = map(model_facts.model_of, torch_live.here.live(Optimizer))
    models = [*filter(None, trained), *(layout.model for layout in live_layouts())]
    others = []
    for model in reversed(models):
        if not (other := evidence_file.misfit(form, evidence_file.form_of(model))):
            return model, ""
        others.append(other)
    return None, others[0] if others else "there is no layout and no optimizer with a model"


here = KeptEvidence()
