"""`nbdist.restore`: a training goes on from a checkpoint, on any ranks and in any layout.

    choose, verify ─▶ fit: what each rank reads ─▶ read into room of its own ─▶ put in place

Until all ranks have read all of it nothing is changed. Main thread, all ranks together.
"""

import io
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from nbdist.engine.checkpoint import agreement, fit, manifest, rest, save, saved, training_state
from nbdist.engine.checkpoint.agreement import each, from_rank_0, same, together
from nbdist.engine.checkpoint.fit import Fit, SavedTraining
from nbdist.engine.checkpoint.folder import TRAINING, CheckpointFolder
from nbdist.engine.checkpoint.saved import Chosen, place_of
from nbdist.engine.checkpoint.training_state import Training
from nbdist.engine.compat.checkpoints.torch_checkpoint import Reader
from nbdist.engine.recovery import sync_state
from nbdist.engine.recovery.snapshots import snapshot
from nbdist.engine.steps import step_state
from nbdist.shared.errors import CheckpointError, UsageError
from nbdist.shared.text import counted


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was restored.

    Attributes:
        folder: Where it lies.
        step: Steps of its optimizer.
        world_size: Ranks that saved it.
        layouts: Of each model on them, by name.
        saved_at: Seconds since 1970.
        metric: What it was saved with, lower being better; None without.
        notes: What goes on otherwise than it was saved, in sentences.
        what: What of it was restored, in words.
    """

    folder: str
    step: int
    world_size: int
    layouts: Mapping[str, str]
    saved_at: float
    metric: float | None = None
    notes: tuple[str, ...] = ()
    what: str = "step"

    def __str__(self) -> str:
        spread = ", ".join(sorted(set(self.layouts.values())))
        said = (
            f"Restored {self.what} {self.step} from {self.folder}, saved "
            f"{_ago(time.time() - self.saved_at)} ago on {counted(self.world_size, 'rank')} "
            f"({spread})."
        )
        notes = (f"{note[0].upper()}{note[1:]}." for note in self.notes)
        return " ".join([said, *notes])


def restore(
    name: str | os.PathLike[str] | None = None,
    *,
    which: str | int = "latest",
    only: Literal["model"] | Collection[Any] | None = None,
    missing_ok: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> Checkpoint | None:
    """Go on from a checkpoint, on any number of ranks and in any layout. On all ranks together.

        layout = nbdist.parallelize(GPT(), "fsdp=2"); opt = layout.optimizer(torch.optim.AdamW)
        loader = nbdist.loader(data, global_batch=32)
        nbdist.restore()
        for epoch in range(loader.epoch, 3):
            for x, y in loader: ...

    Build model, optimizer, scheduler and loader as always, then restore: all that `nbdist.save`
    saves is put back, each rank reading its own parts. Every file's checksum is compared first.
    On the same ranks and layout training goes on bit for bit. `.metadata` and `training.pt` are
    pickles: restore from folders that you trust.

    Args:
        name: As of `nbdist.save`, or the folder of one checkpoint.
        which: "latest", "best" (by the metric), or a step.
        only: Models and optimizers, or the names of their variables: these are restored, with what
            hangs on them, and others in the checkpoint are left out. "model" restores the weights
            of all models, and leaves optimizers, loaders and random numbers as they are.
        missing_ok: Return None where there is no checkpoint at all.
        storage_options: For the library behind a URL, as fsspec takes them.

    Returns:
        What was restored.

    Raises:
        CheckpointError: There is none, it is of another model, its files are damaged, or they
            cannot be reached; the same on all ranks, and nothing was changed.
        UsageError: An argument makes no sense.
    """
    if not (only in (None, "model") or (isinstance(only, list | tuple) and only)):
        raise UsageError(
            'nbdist.restore takes only="model", or a list of models and optimizers or the names of '
            f"their variables, not only={only!r}."
        )
    save.require_rank("nbdist.restore")
    what = None if only == "model" else only
    same(f"name={name!r}, which={which!r}, only={save.described(only)}", "nbdist.restore")
    save.here.settle()
    url, folder = _one_of(place_of(name, "nbdist.restore"), which)
    place = each(lambda: CheckpointFolder(url, storage_options), url)
    found = from_rank_0(lambda: saved.choose(place, which, folder), url)
    if found is None:
        if missing_ok:
            return None
        raise from_rank_0(lambda: saved.missing(place), url)
    save.here.restores += 1
    save.here.restored_at = found.commit.saved_at
    return go_on_from(place, found, only_model=only == "model", what=what)


def _one_of(url: str, which: str | int) -> tuple[str, str]:
    """Return the place of the URL of one checkpoint, and its folder's name; of a place, no name."""
    above, _, last = url.rstrip("/").rpartition("/")
    return (above, last) if manifest.order(last) and which == "latest" else (url, "")


def go_on_from(
    place: CheckpointFolder,
    found: Chosen,
    *,
    only_model: bool = False,
    what: Collection[Any] | None = None,
    repeats: bool = False,
    among: Collection[torch.optim.Optimizer] | None = None,
) -> Checkpoint:
    """Go on from one checkpoint, and say so. Collective.

    Args:
        place: Where it lies.
        found: Which.
        only_model: Whether weights alone are restored.
        what: A list, as `restore` takes it in `only`.
        repeats: As of `rest.put_moment`.
        among: As of `training_state.find`.

    Raises:
        CheckpointError: As `restore`.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder = place.folder(found.name)

    def find() -> Training:
        every = training_state.find(among)
        return every if what is None else training_state.asked(every, what, "nbdist.restore")

    training = agreement.found(find, "nbdist.restore")
    together(lambda: saved.verify(place, found, rank, ranks), folder)
    is_part = what is not None
    facts, fitted = _read(training, place, found, only_model=only_model, is_part=is_part)
    training = fitted.training
    loads = rest.Loads(fitted.loads)
    try:
        each(loads.load, folder)
    except BaseException:
        loads.undo()
        raise
    each(lambda: _put(training, fitted), folder)
    save.here.know(training)
    notes = list(fitted.notes)
    if not only_model:
        is_alike = _is_alike(facts, found, fitted)
        notes += rest.put_moment(facts, fitted, is_alike=is_alike, repeats=repeats)
    restored = _told(folder, found, notes, "the model of step" if only_model else "step")
    if rank == 0:
        print(restored)
    return restored


def _read(
    training: Training, place: CheckpointFolder, found: Chosen, *, only_model: bool, is_part: bool
) -> tuple[list[dict[str, Any]], Fit]:
    """Read this rank's parts beside what is there. Collective."""
    folder, rank = place.folder(found.name), dist.get_rank()

    def fit_all() -> tuple[list[dict[str, Any]], Reader, SavedTraining, Fit]:
        try:
            facts = torch.load(
                io.BytesIO(place.read(found.name, TRAINING)), "cpu", weights_only=False
            )
            options = {} if place.is_local else place.options
            reader = Reader(folder, is_local=place.is_local, options=options)
        except Exception as error:  # unpickling raises anything; the files are as they were written
            raise CheckpointError(
                f"{folder} cannot be read here.",
                why=f"{type(error).__name__}: {error}",
                do=_how_to_read(found.commit.torch),
            ) from error
        saved = SavedTraining(reader.tensors(), facts)
        fitted = fit.fit(training, saved, rank, only_model=only_model, is_part=is_part)
        if not only_model and not fitted.complaints:
            rest.fit(facts, rank, fitted, is_alike=_is_alike(facts, found, fitted))
        if fitted.complaints:
            raise _other(folder, fitted.complaints, _ways_out(fitted))
        return facts, reader, saved, fitted

    facts, reader, saved, fitted = each(fit_all, folder)
    everywhere = together(lambda: (fitted.pairs, fitted.used))
    if other := next((pairs for pairs, _ in everywhere if pairs != everywhere[0][0]), ""):
        raise _other(folder, [f"ranks find it to be {everywhere[0][0]}, and {other}"])
    more = fit.unexpected(saved, fitted.models.values(), [used for _, used in everywhere])
    if more:
        raise _other(folder, [f"it has {fit.some_of(more)}, which the model here has not"])
    together(lambda: reader.read(fitted.parts), folder)
    return facts, fitted


def _is_alike(facts: list[dict[str, Any]], found: Chosen, fitted: Fit) -> bool:
    """Return whether it is spread over as many ranks, in the same layouts."""
    layouts = {fitted.models[model.name]: model.spread_as for model in fitted.training.models}
    there = {name: found.commit.layouts.get(name) for name in layouts}
    return len(facts) == dist.get_world_size() and layouts == there


def _how_to_read(torch_version: str) -> str:
    if torch_version != torch.__version__:
        return f"use torch {torch_version}, which wrote it; this is {torch.__version__}"
    return "define the classes that kept states name before restoring"


def _ways_out(fitted: Fit) -> str:
    """Return what else can be done where a checkpoint does not fit."""
    if fitted.alone:
        return f", or leave the rest out: nbdist.restore(only={fitted.alone})"
    alone = ', or take the weights alone: nbdist.restore(only="model")'
    return alone if fitted.is_same_model else ""


def _other(folder: str, complaints: list[str], ways_out: str = "") -> CheckpointError:
    return CheckpointError(
        f"{folder} does not fit the training here, and nothing was restored from it: "
        f"{'; '.join(complaints)}.",
        do=f"build what was saved{ways_out}",
    )


def _put(training: Training, fitted: Fit) -> None:
    """Have this rank's training be what was read."""
    for put in fitted.puts:
        put()
    sync_state.here.allow_again([model.module for model in training.models], training.optimizers)
    snapshot.here.forget()
    boundary = step_state.here()
    boundary.last = boundary.take()


def _told(folder: str, found: Chosen, notes: list[str], what: str) -> Checkpoint:
    commit = found.commit
    return Checkpoint(
        folder,
        commit.step,
        commit.world_size,
        commit.layouts,
        commit.saved_at,
        commit.metric,
        tuple(notes),
        what,
    )


def _ago(seconds: float) -> str:
    """Return how long ago, in its largest unit."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return counted(int(seconds // size), unit)
    return counted(max(1, int(seconds)), "second")
