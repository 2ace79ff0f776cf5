"""Where checkpoints lie, what each holds (`nbdist.saved`), and which is restored.

Files alone, no torch: on a rank, in the notebook, in any process. Any thread.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

from nbdist.engine.checkpoint.folder import COMMIT, CheckpointFolder
from nbdist.engine.checkpoint.manifest import FORMAT, Manifest, best_of, order
from nbdist.shared import side
from nbdist.shared.errors import CheckpointError, UsageError
from nbdist.shared.text import aligned, counted, figure

# ---- Where --------------------------------------------------------------------------------------


class DefaultFolder:
    """Where the checkpoints of a process lie that have no name."""

    def __init__(self) -> None:
        self._told = ""

    @property
    def folder(self) -> str:
        """Where those without a name lie, and words beside it."""
        return self._told or side.notebook.checkpoints() or ".nbdist/checkpoints/notebook"

    def lie_beside(self, folder: str) -> None:
        """Have checkpoints without a name lie in this folder; "": as before."""
        self._told = folder or self._told


def place_of(name: str | os.PathLike[str] | None, call: str = "nbdist.save") -> str:
    """Return the folder or URL that a name stands for.

    Args:
        name: None, a word, a folder or a URL.
        call: Which takes it, for the error.

    Raises:
        UsageError: It is none of these.
    """
    if name is None:
        return here.folder
    if isinstance(name, os.PathLike):
        name = os.path.join(os.fspath(name), "")
    if not isinstance(name, str) or not name or name != name.strip():
        raise UsageError(f"{call} takes a name, a folder or a URL, not {name!r}.")
    if "://" in name or os.sep in name or name.startswith(("~", ".")):
        return name
    return os.path.join(os.path.dirname(here.folder), name)


# ---- What each holds ----------------------------------------------------------------------------


class LoaderPlace(NamedTuple):
    """Where a loader stood.

    Attributes:
        name: What cells called it; "loader" where they did not.
        epoch: From 0.
        sample: Samples of this epoch that all ranks together had been given.
    """

    name: str
    epoch: int
    sample: int


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint, without its tensors.

    Attributes:
        folder: Where it lies: `nbdist.restore` takes it as its name.
        step: Steps of its optimizer.
        saved_at: Seconds since 1970.
        world_size: Ranks that saved it.
        models: The class of each, by the variable's name that led to it, or else by its own.
        others: The same of optimizers, schedulers, averages, and what `nbdist.keep` named.
        layouts: How each model was spread, by the same names as `models`.
        loaders: Where each stood.
        metric: What it was saved with, lower being better; None without.
        is_automatic: Whether a cell saved it by itself (`--checkpoint`).
        is_best: Whether it is the one that `which="best"` takes.
        damage: Why it cannot be restored, where that is seen at once; "" where it is not. Files
            are compared with their checksums by `nbdist.restore` alone.
    """

    folder: str
    step: int = 0
    saved_at: float = 0.0
    world_size: int = 0
    models: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    loaders: tuple[LoaderPlace, ...] = ()
    metric: float | None = None
    is_automatic: bool = False
    is_best: bool = False
    damage: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class SavedList(Sequence[SavedCheckpoint]):
    """The checkpoints of a place, in the order of their steps; printed as a table.

    Attributes:
        place: The folder or URL.
        checkpoints: Those that are complete, or damaged; none of saves that did not end.
    """

    place: str
    checkpoints: tuple[SavedCheckpoint, ...]

    @overload
    def __getitem__(self, at: int) -> SavedCheckpoint: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[SavedCheckpoint]: ...

    def __getitem__(self, at: int | slice) -> SavedCheckpoint | Sequence[SavedCheckpoint]:
        return self.checkpoints[at]

    def __len__(self) -> int:
        return len(self.checkpoints)

    def __iter__(self) -> Iterator[SavedCheckpoint]:
        return iter(self.checkpoints)

    def __repr__(self) -> str:
        if not self.checkpoints:
            return f"There is no checkpoint in {self.place}."
        rows = [["step", "saved", "ranks", "models", "with", "loaders", ""]]
        rows += [_row(one) for one in self.checkpoints]
        sides = [True, False, True, False, False, False, False]
        return "\n".join([f"In {self.place}:", *aligned(rows, sides)])


def saved(
    name: str | os.PathLike[str] | None = None, *, storage_options: dict[str, Any] | None = None
) -> SavedList:
    """Return the checkpoints of a place, and what each of them holds.

        nbdist.saved("run")            # shown: a table
        nbdist.saved("run")[-1].models # {"model": "GPT"}

    It reads a small file of each, and neither tensors nor pickles. In a cell of ranks each rank
    reads by itself; the notebook can ask, too.

    Args:
        name: As of `nbdist.save`.
        storage_options: For the library behind a URL, as fsspec takes them.

    Returns:
        In the order of their steps; empty where there is none.

    Raises:
        CheckpointError: The place cannot be reached.
        UsageError: `name` makes no sense.
    """
    place = CheckpointFolder(place_of(name, "nbdist.saved"), storage_options)
    found, damaged = place.survey()
    best = best_of(found)
    ones = [_checkpoint(place.folder(n), c, is_best=n == best) for n, c in found.items()]
    what = f"{COMMIT} is not what was written"
    ones += [SavedCheckpoint(place.folder(n), damage=what) for n in damaged]
    return SavedList(place.url, tuple(ones))


def _checkpoint(folder: str, commit: Manifest, *, is_best: bool) -> SavedCheckpoint:
    if commit.format != FORMAT:
        return SavedCheckpoint(folder, damage=f"written by nbdist {commit.nbdist}, a newer one")
    held = commit.holds
    models = held.get("models") or {name: [[], name.partition("-")[0]] for name in commit.layouts}
    named = {own: (called or [own])[0] for own, (called, _) in models.items()}
    loaders = ((names or ["loader"], epoch, at) for names, epoch, at in held.get("loaders", ()))
    return SavedCheckpoint(
        folder,
        commit.step,
        commit.saved_at,
        commit.world_size,
        {named[own]: kind for own, (_, kind) in models.items()},
        _by_name(held.get("others", ())),
        {named[own]: layout for own, layout in commit.layouts.items()},
        tuple(LoaderPlace(names[0], epoch, at) for names, epoch, at in loaders),
        commit.metric,
        commit.is_automatic,
        is_best,
    )


def _by_name(held: Iterable[tuple[Sequence[str], str]]) -> dict[str, str]:
    """Return classes by name; of those without one by class, and a number where it is taken."""
    found: dict[str, str] = {}
    for called, kind in held:
        name = called[0] if called else kind
        taken = sum(one.rpartition("-")[0] == name or one == name for one in found)
        found[f"{name}-{taken + 1}" if taken else name] = kind
    return found


def _row(one: SavedCheckpoint) -> list[str]:
    if one.damage:
        return ["?", "", "", f"{one.folder}: {one.damage}", "", "", ""]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.saved_at))
    models = ", ".join(f"{n} ({k}, {one.layouts[n]})" for n, k in one.models.items())
    others = ", ".join(f"{name} ({kind})" for name, kind in one.others.items())
    loaders = ", ".join(f"{n} at sample {at:,} of epoch {epoch}" for n, epoch, at in one.loaders)
    notes = ["" if one.metric is None else f"metric {figure(one.metric)}"]
    notes += ["best"] * one.is_best + ["by --checkpoint"] * one.is_automatic
    said = ", ".join(filter(None, notes))
    return [f"{one.step:,}", when, str(one.world_size), models, others, loaders, said]


# ---- Which is restored --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint to be restored; `before` is the step of the last good one before it."""

    name: str
    commit: Manifest
    before: int | None = None


def choose(place: CheckpointFolder, which: str | int, folder: str = "") -> Chosen | None:
    """Return the checkpoint that is asked for; None: there is none at all.

    Args:
        place: Where they lie.
        which: "latest", "best" or a step.
        folder: The name of one of them, which is taken whatever `which` says.

    Raises:
        CheckpointError: That one is not there, or this version cannot read it.
        UsageError: `which` makes no sense.
    """
    if which not in ("latest", "best") and (isinstance(which, bool) or not isinstance(which, int)):
        raise UsageError(f'nbdist.restore takes "latest", "best" or a step, not {which!r}.')
    found, broken = place.survey()
    # The best follows from what all say of themselves; its pointer is written later, for people.
    pointed = folder or (place.pointer("latest") if which == "latest" else None)
    for name in broken:
        step, _ = order(name) or (0, 0)
        if name == pointed or (step == which and not folder) or not found:
            what = f"{COMMIT} is not what was written"
            raise damaged(place.folder(name), what, _step_before(found, step))
    if not found:
        return None
    if folder and folder not in found:
        raise CheckpointError(
            f"{place.folder(folder)} is no checkpoint.",
            why="its save did not come to an end" if folder in place.names() else "",
            do=f"those in {place.url} are {', '.join(found)}",
        )
    name = _name(place, found, which, pointed)
    commit = found[name]
    if commit.format != FORMAT:
        raise CheckpointError(
            f"{place.folder(name)} was written by nbdist {commit.nbdist or 'of a later time'}, in "
            "a format that this version cannot read.",
            do="update nbdist where the ranks run",
        )
    return Chosen(name, commit, _step_before(found, commit.step))


def newest_since(place: CheckpointFolder, since: float) -> Chosen | None:
    """Return the newest checkpoint that was saved at this time or later; None: there is none."""
    found = {n: c for n, c in place.committed().items() if c.saved_at >= since}
    if not found:
        return None
    name = max(found, key=lambda name: (found[name].saved_at, order(name)))
    return Chosen(name, found[name])


def _step_before(found: dict[str, Manifest], step: int) -> int | None:
    older = [c.step for c in found.values() if c.step < step and c.format == FORMAT]
    return max(older, default=None)


def _name(
    place: CheckpointFolder, found: dict[str, Manifest], which: str | int, pointed: str | None
) -> str:
    by_age = sorted(found, key=lambda name: (found[name].saved_at, order(name)))
    if isinstance(which, int) and pointed is None:
        of_step = [name for name in by_age if found[name].step == which]
        if of_step:
            return of_step[-1]
        known = {c.step for c in found.values() if c.format == FORMAT}
        steps = ", ".join(str(step) for step in sorted(known))
        raise CheckpointError(
            f"{place.url} has no checkpoint of step {which}.", do=f"it has those of step {steps}"
        )
    if pointed in found:
        return pointed
    best = best_of(found) if which == "best" else None
    if best is not None:
        return best
    if which == "best":
        raise CheckpointError(
            f"No checkpoint in {place.url} was saved with a metric, so none is the best.",
            do="save with one: nbdist.save(metric=loss)",
        )
    return by_age[-1]


def missing(place: CheckpointFolder) -> CheckpointError:
    """Return what is said where there is no checkpoint at all."""
    begun = len(place.names())
    return CheckpointError(
        f"There is no checkpoint in {place.url}.",
        why=f"{counted(begun, 'save')} there did not come to an end" if begun else "",
        do="save one with nbdist.save(), or name another folder: nbdist.restore(folder)",
    )


def verify(place: CheckpointFolder, chosen: Chosen, part: int, parts: int) -> None:
    """Read every `parts`-th file whole, from the `part`-th on, and compare the checksums.

    Raises:
        CheckpointError: One is missing, cut short, or not what was written.
    """
    mine = sorted(chosen.commit.files)[part::parts]
    found = place.damage(place_name := chosen.name, chosen.commit, mine).found
    if found:
        raise damaged(place.folder(place_name), "; ".join(found), chosen.before)


def damaged(folder: str, what: str, before: int | None) -> CheckpointError:
    """Return what is said of a checkpoint that cannot be read whole."""
    return CheckpointError(
        f"{folder} is damaged, and nothing was restored from it: {what}.",
        do="there is no older checkpoint beside it"
        if before is None
        else f"restore the last good one before it: nbdist.restore(which={before})",
    )


here = DefaultFolder()
