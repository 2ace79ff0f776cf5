"""The samples that a loader left out, for they could not be loaded. Pure: no torch.

What was left out of a batch counts once the loop has it. After a fault the loader goes back, and
what lies behind its position is forgotten: it will be tried again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from nbdist.shared.text import counted

MOST_KEPT = 10_000  # by name; beyond, they are counted
MOST_NAMED = 8  # in a line


class Skipped(NamedTuple):
    """A sample that was left out: its index in the dataset, in which epoch, and why."""

    epoch: int
    sample: int
    why: str


@dataclass(slots=True)
class LeftOut:
    """Those of one loader, on one rank.

    `repeated` counts samples of other ranks' parts that stood in for a part of which none could be
    loaded.
    """

    count: int = 0
    repeated: int = 0
    _kept: list[tuple[int, Skipped]] = field(default_factory=list)  # each with its batch's begin
    _untold: int = 0  # of `_kept`: those before are told of

    def add(self, start: int, skipped: Iterable[Skipped], repeated: int = 0) -> None:
        """Take in what was left out of the batch that begins at position `start` of its epoch."""
        self.repeated += repeated
        for one in skipped:
            self.count += 1
            if len(self._kept) < MOST_KEPT:
                self._kept.append((start, one))

    def go_back(self, epoch: int, consumed: int) -> None:
        """Forget what was left out behind a position, to which the loader goes back."""
        stays = [
            (start, one) for start, one in self._kept if (one.epoch, start) < (epoch, consumed)
        ]
        self.count -= len(self._kept) - len(stays)
        self._untold = min(self._untold, len(stays))
        self._kept = stays

    def all(self) -> tuple[Skipped, ...]:
        """Return what was left out, oldest first."""
        return tuple(one for _, one in self._kept)

    def take_notice(self, rank: int) -> str:
        """Return what is to be told since the last call; "" where nothing is."""
        new = [one for _, one in self._kept[self._untold :]]
        self._untold = len(self._kept)
        if not new:
            return ""
        names = ", ".join(str(one.sample) for one in new[:MOST_NAMED])
        more = f" and {len(new) - MOST_NAMED} more" if len(new) > MOST_NAMED else ""
        why = " ".join(new[0].why.split()).rstrip(".")
        return (
            f'on_bad="skip": rank {rank} left out {counted(len(new), "sample")} of the dataset '
            f"({names}{more}), the first because of {why}. loader.skipped names them."
        )
