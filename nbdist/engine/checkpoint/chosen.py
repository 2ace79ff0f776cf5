"""Which checkpoint is restored, and whether its files are what was written.

Any thread; files alone, no torch.
"""

from dataclasses import dataclass

from nbdist.engine.checkpoint.folder import COMMIT, CheckpointFolder
from nbdist.engine.checkpoint.manifest import FORMAT, Manifest, best_of, order
from nbdist.shared.errors import CheckpointError, UsageError
from nbdist.shared.text import counted


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
    pointed = folder or (None if isinstance(which, int) else place.pointer(which))
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
