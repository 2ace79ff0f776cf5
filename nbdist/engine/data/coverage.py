"""`nbdist.coverage`: which samples loops over loaders were given how often, over all ranks.

Main thread, all ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from nbdist.engine.data import alike, counts
from nbdist.engine.data.counts import Kind
from nbdist.engine.data.loaders import Loader
from nbdist.engine.data.position import account, journal, position
from nbdist.engine.data.position.journal import JournalEntry
from nbdist.engine.steps import keep
from nbdist.shared import side
from nbdist.shared.errors import UsageError
from nbdist.shared.text import aligned, counted

_MOST_LINES = 20  # of the table; beyond it only the newest half, and what is wrong
_UNKNOWN: dict[str, Any] = {"cell": -1, "prompt": -1, "name": "", "samples": None}
_WORDS = {
    "missing": "missing",
    "repeated": "given twice or more",
    "left_out": "left out at the end",
    "skipped": "could not be read",
}


@dataclass(frozen=True, slots=True)
class EpochCoverage:
    """One epoch of one loader, over all ranks: each number counts samples.

    Attributes:
        loader: What the cells call it; "loader" where they do not.
        cell: In which it was made, by the number that errors name; 0 where it was no cell.
        epoch: From 0.
        samples: In the epoch; None for a stream whose end is not known yet.
        once: Given once.
        missing: Given to no rank, though the epoch went on beyond them.
        repeated: Given twice or more.
        left_out: Dropped at the end of the epoch (`drop_last`, or fewer than there are ranks).
        skipped: Could not be read, and were left out (`on_bad="skip"`).
        before: Given before this session, or before the loader took up another's position.
        to_come: Of an epoch that is not over.
        ids: By kind (`missing`, `repeated`, `left_out`, `skipped`) the dataset's indices of the
            first few samples, or their positions.
        is_by_position: `ids` are positions in the epoch's order: of a stream, of a loader that
            is no more, or where it is `unsure`.
        places: Positions in the epoch; more than samples where a sampler gives some several times.
        unsure: Why positions were counted without knowing which samples they are; "" where samples
            were.
    """

    loader: str
    cell: int
    epoch: int
    samples: int | None
    once: int
    missing: int
    repeated: int
    left_out: int
    skipped: int
    before: int
    to_come: int
    ids: dict[str, tuple[int, ...]]
    is_by_position: bool = False
    places: int | None = None
    unsure: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether it is known that no sample is missing, and none came twice, so far."""
        return not self.missing and not self.repeated and not self.unsure

    @property
    def title(self) -> str:
        """The loader, told from others of its name."""
        return f"{self.loader} (cell {self.cell})" if self.cell > 0 else self.loader


@dataclass(frozen=True, slots=True)
class Coverage:
    """What `nbdist.coverage` found: the same on every rank.

    Attributes:
        epochs: Of each loader, in order.
        ranks: How many there are now.
        is_exact: Whether it is known that no sample is missing, and none came twice, in all epochs.
    """

    epochs: tuple[EpochCoverage, ...]
    ranks: int

    @property
    def is_exact(self) -> bool:
        """Whether it is known that no sample is missing, and none came twice, in all epochs."""
        return all(epoch.is_exact for epoch in self.epochs)

    def __repr__(self) -> str:
        return f"{self.table()}\n{self.verdict}" if self.epochs else self.verdict

    @property
    def verdict(self) -> str:
        """What was found, in one sentence."""
        if not self.epochs:
            return "No loop over a loader of nbdist was given a batch."
        if self.is_exact:
            once = sum(epoch.once for epoch in self.epochs)
            return f"Each sample once: {once:,} in {counted(len(self.epochs), 'epoch')}."
        missing, repeated = (
            sum(getattr(epoch, name) for epoch in self.epochs) for name in ("missing", "repeated")
        )
        if not missing and not repeated:
            return "Which samples came how often is not known."
        return f"{counted(missing, 'sample')} missing, {repeated:,} given twice or more."

    def table(self) -> str:
        """Return a line an epoch, and the ids of what is wrong."""
        rows = [["loader", "epoch", "samples", "once", "missing", "twice", "left out", "to come"]]
        notes: list[str] = []
        shown = _shown(self.epochs)
        for epoch in shown:
            numbers = [epoch.once, epoch.missing, epoch.repeated]
            numbers.append(epoch.left_out + epoch.skipped)
            counts_of = [f"{one:,}" for one in numbers]
            is_known = epoch.samples is not None  # of a stream, once it has come to its end
            total = f"{epoch.samples:,}" if is_known else "?"
            to_come = f"{epoch.to_come:,}" if is_known else "?"
            rows.append([epoch.title, str(epoch.epoch), total, *counts_of, to_come])
            notes += _notes(epoch)
        if len(shown) < len(self.epochs):
            notes.append(f"{len(self.epochs) - len(shown):,} more epochs, each as it should be.")
        return "\n".join([*aligned(rows, [False, *[True] * 7]), *notes])


def coverage() -> Coverage:
    """Count how often each sample was given to a loop, over all ranks. Collective.

    Each rank notes which part of each batch its loops over `nbdist.loader` were given. What a fault
    has undone (given, but beyond the optimizer's last step) does not count, and neither does the
    batch of a loop that only looked at its first. Ranks that died or left count with what they
    were given. Ranks that get the same samples by design (tp, pp, cp) count once.

    Returns:
        What was found, by loader and epoch, the same on every rank. Shown or printed it is a table.

    Raises:
        UsageError: This process is no rank.
    """
    side.require_rank("nbdist.coverage")
    living = {one.account.loader: one for one in position.here.in_order()}
    is_group = dist.is_available() and dist.is_initialized()
    entries, about = _together(journal.here().entries(), _named(), is_group=is_group)
    if not is_group and not entries:
        raise UsageError(
            "nbdist.coverage() counts on the ranks, and this process is none.",
            why="loops over nbdist.loader run there",
            do="call it in a %%distributed cell, on all ranks",
        )
    return Coverage(tuple(_each(entries, about, living)), dist.get_world_size() if is_group else 1)


def _named() -> dict[int, dict[str, Any]]:
    """Return what is known of the loaders, with the names that cells have given to them."""
    names: dict[int, str] = {}
    for name, value in keep.here.named().items():
        if isinstance(value, Loader) and not name.startswith("_"):
            names.setdefault(value._standing.account.loader, name)
    return {key: {**facts, "name": names.get(key, "")} for key, facts in account.here.about.items()}


def _together(
    entries: list[JournalEntry], about: dict[int, dict[str, Any]], *, is_group: bool
) -> tuple[list[JournalEntry], dict[int, dict[str, Any]]]:
    """Return all ranks' entries, and what is known of loaders; the first rank's word counts."""
    if not is_group:
        return entries, about
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (entries, about))
    known: dict[int, dict[str, Any]] = {}
    for _, facts in reversed(everyone):
        known |= facts
    for loader in known:
        each = [facts[loader].get("alike", {}) for _, facts in everyone if loader in facts]
        known[loader] = {**known[loader], "differs": alike.differing(each)}
    return [entry for each, _ in everyone for entry in each], known


def _each(
    entries: Iterable[JournalEntry],
    about: Mapping[int, dict[str, Any]],
    living: Mapping[int, position.LoaderPosition],
) -> Iterator[EpochCoverage]:
    """Return every epoch of every loader, loaders in the order in which they were made."""
    by_epoch = counts.by_epoch(entries)
    last = dict(sorted(by_epoch))
    places = {loader: at for at, loader in enumerate(about)}
    names = _told_apart({loader: about.get(loader, _UNKNOWN) for loader, _ in by_epoch}, places)

    def place(key: tuple[int, int]) -> tuple[int, int, int]:
        return about.get(key[0], _UNKNOWN)["cell"], places.get(key[0], -1), key[1]

    for loader, epoch in sorted(by_epoch, key=place):
        facts = about.get(loader, _UNKNOWN)
        standing = living.get(loader)
        order = None if standing is None else standing.batches.samples_of(epoch)
        found = counts.count(
            by_epoch[loader, epoch],
            facts["samples"],
            is_followed=epoch < last[loader],
            order=None if order is None else order.numpy(),
        )
        kinds: dict[str, Kind] = {
            "missing": found.missing,
            "repeated": found.repeated,
            "left_out": found.left_out,
            "skipped": found.skipped,
        }
        unsure = _unsure(facts, is_alive=standing is not None)
        yield EpochCoverage(
            names[loader],
            facts["prompt"],
            epoch,
            found.samples,
            found.once,
            **{kind: value.count for kind, value in kinds.items()},
            before=found.before,
            to_come=found.to_come,
            ids={
                kind: tuple(
                    standing.batches.ids(epoch, value.first)
                    if standing and order is None
                    else value.first
                )
                for kind, value in kinds.items()
                if value.count
            },
            is_by_position=standing is None or facts["samples"] is None or bool(unsure),
            places=facts["samples"],
            unsure=unsure,
        )


def _told_apart(
    about: Mapping[int, Mapping[str, Any]], places: Mapping[int, int]
) -> dict[int, str]:
    """Return a name for each loader: its own, or "loader"; with a number where a cell has more."""
    by_name: dict[tuple[str, int], list[int]] = {}
    for loader in sorted(about, key=lambda one: places.get(one, -1)):
        facts = about[loader]
        by_name.setdefault((facts["name"] or "loader", facts["prompt"]), []).append(loader)
    return {
        loader: name if len(loaders) == 1 else f"{name} {nth}"
        for (name, _), loaders in by_name.items()
        for nth, loader in enumerate(loaders, 1)
    }


def _unsure(facts: Mapping[str, Any], *, is_alive: bool) -> str:
    """Return why a loader's positions do not tell its samples; "" where they do."""
    if differs := facts.get("differs"):
        return (
            f"ranks differ in {differs}, so which samples came how often is not known: "
            "positions are counted. Do: make it the same on all ranks, such as by a seed"
        )
    if facts.get("repeats") and not is_alive:
        return "its sampler gives samples more than once, and is no more: positions are counted"
    return ""


def _shown(epochs: Sequence[EpochCoverage]) -> list[EpochCoverage]:
    """Return those that the table shows: all, or the newest and those with something wrong."""
    newest = set(range(len(epochs) - _MOST_LINES // 2, len(epochs)))
    if len(epochs) <= _MOST_LINES:
        return list(epochs)
    return [epoch for at, epoch in enumerate(epochs) if at in newest or not epoch.is_exact]


def _notes(epoch: EpochCoverage) -> Iterator[str]:
    """Tell the first samples of each kind that is not as it should be, or not given."""
    for kind, words in _WORDS.items():
        number = getattr(epoch, kind)
        if number:
            where = "positions " if epoch.is_by_position else ""
            first = ", ".join(map(str, epoch.ids[kind]))
            more = ", ..." if number > len(epoch.ids[kind]) else ""
            yield f"{epoch.title}, epoch {epoch.epoch}, {words}: {where}{first}{more}"
    if epoch.unsure:
        yield f"{epoch.title}, epoch {epoch.epoch}: {epoch.unsure}."
    elif epoch.samples and epoch.places and epoch.places > epoch.samples:
        yield (
            f"{epoch.title}, epoch {epoch.epoch}: its sampler gives {epoch.samples:,} samples at "
            f"{epoch.places:,} places."
        )
    if epoch.before:
        yield (
            f"{epoch.title}, epoch {epoch.epoch}: its first {counted(epoch.before, 'sample')} "
            "were given before this session, and are not counted."
        )
