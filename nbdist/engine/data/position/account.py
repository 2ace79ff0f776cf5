"""What one loader has been given so far, in the journal of this rank.

A loader keeps its account while it goes on: made again by a cell that is run again, restored from
a checkpoint of this session, cloned to a replacement rank.

Main thread.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nbdist.engine.data.batches import Shard
from nbdist.engine.data.position import journal
from nbdist.engine.data.position.journal import JournalEntry

_FILE = "journal-{}-{}"  # the cluster's token, the rank


class Account:
    """The entries of one loader. It travels to replacement ranks with its loader."""

    def __init__(self, cell: int, spec: tuple[Any, ...], **about: Any) -> None:
        """Open an account.

        Args:
            cell: The number of the cell that makes the loader.
            spec: What tells its batches; loaders of a cell with the same are told apart in order.
            about: What it is, for people.
        """
        # The same in another session, where its cell makes the same loaders.
        self.kind = _number(*spec, here.count_alike(cell, *spec))
        self.loader = _number(here.session(), cell, self.kind)
        self.born = self.loader  # before it went on as another
        self.served = 0  # batches that loops were given; the serial of the next
        self._part = range(0)  # of the newest batch, this rank's positions
        here.about[self.loader] = {"cell": cell, **about}

    def __setstate__(self, state: dict[str, Any]) -> None:
        about = state.pop("about")
        self.__dict__.update(state)
        here.about.setdefault(self.loader, about)
        # In a replacement rank, whose predecessor may have been given more.
        journal.here().cut(self.loader, self.served)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "about": here.about.get(self.loader, {})}

    def give(self, epoch: int, batch: range, part: range, shard: Shard) -> None:
        """Note that a loop gets `part` of the global batch `batch`."""
        journal.here().give(self.loader, self.served, epoch, batch, part, shard)
        self.served += 1
        self._part = part

    def leave_out_of_newest(
        self, epoch: int, batch: range, skipped: Iterable[int], repeated: Iterable[int]
    ) -> None:
        """Note samples of the newest batch that could not be read, or stand in for such ones.

        Args:
            epoch: Of the batch.
            batch: Its positions.
            skipped: Which samples of this rank's part.
            repeated: Which samples of the whole batch, once more.
        """
        for first, count in runs(skipped):
            self._note(journal.SKIPPED, epoch, self._part.start + first, count)
        for nth in repeated:
            about = batch.start, len(batch), 1, nth, 1
            journal.here().add(
                JournalEntry(self.loader, journal.GIVEN, self.served - 1, epoch, *about)
            )

    def go_back(self, served: int) -> None:
        """Forget what was given after the first `served` batches."""
        journal.here().cut(self.loader, served)
        self.served = served

    def leave_out(self, epoch: int, positions: range, *, is_bad: bool = False) -> None:
        """Note samples that no rank is given, or (`is_bad`) that could not be read."""
        kind = journal.SKIPPED if is_bad else journal.LEFT_OUT
        self._note(kind, epoch, positions.start, len(positions))

    def end_epoch(self, epoch: int, samples: int) -> None:
        """Note that a loop has come to the end of an epoch."""
        self._note(journal.OVER, epoch, samples, 0)

    def continue_as(self, other: "Account", served: int) -> None:
        """Go on with the entries of another loader, after its first `served` batches."""
        self.loader = other.loader
        self.go_back(served)

    def state(self) -> dict[str, Any]:
        """Return what a loader's state says, so that a restored one goes on here."""
        served = {"loader": self.loader, "served": self.served}
        return {"session": here.session(), "kind": self.kind, **served}

    def resume(self, state: dict[str, Any] | None, epoch: int, consumed: int) -> None:
        """Go on where a state was taken, or note what was given in another session."""
        if state is not None and state["session"] and state["session"] == here.session():
            about = here.about[self.loader]
            self.loader = state["loader"]
            here.about.setdefault(self.loader, about)  # unknown where no rank has outlived it
            self.go_back(state["served"])
        elif epoch or consumed:
            self._note(journal.BEFORE, epoch, 0, consumed)

    def _note(self, kind: int, epoch: int, start: int, size: int) -> None:
        journal.here().add(JournalEntry(self.loader, kind, self.served, epoch, start, size))


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as runs: the first of each, and how many."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((number, 1))
    return found


class Accounts:
    """The accounts of a process, and the session that they are of.

    Attributes:
        about: What each loader is, for people, by its number in the journal.
    """

    def __init__(self) -> None:
        self.about: dict[int, dict[str, Any]] = {}
        self._session = ""  # that of the cluster; the same on all its ranks
        self._made: Counter[int] = Counter()  # loaders by what they were made of

    def session(self) -> str:
        """Return what tells this cluster, or program, from others; "" where nothing does."""
        return self._session or os.environ.get("MASTER_PORT", "")

    def count_alike(self, cell: int, *spec: Any) -> int:
        """Count a loader that a cell makes; return how many of the same it has made before."""
        number = _number(cell, *spec)
        self._made[number] += 1
        return self._made[number] - 1

    def keep_in(self, folder: Path, token: str, rank: int, ranks: int, *, is_first: bool) -> None:
        """Keep the journal in a file that outlives this process, after each join.

        Args:
            folder: The cluster's on this host.
            token: Of the cluster.
            rank: This process's.
            ranks: How many there are now.
            is_first: A new cluster begins.
        """
        entries = journal.here()
        if not self._session:
            entries.keep_in(folder / _FILE.format(token, rank), is_new=is_first)
        self._session = f"{folder.name}-{token}"
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:
            entries.take_over(folder, _FILE.format(token, "{}"), ranks)


def _number(*parts: Any) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


here = Accounts()
