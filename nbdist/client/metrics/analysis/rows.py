"""Calls of many ranks as columns of numbers, and what similar calls have in common beside them.

The columns are numpy arrays: a cell tells thousands of calls a second, which Python objects would
not bear. Threads: belongs to `nbdist-analysis`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt

from nbdist.shared.packed import CALL, TICK_NS, WAIT, Calls, Template

Ints = npt.NDArray[np.int64]

MOST_FAMILIES = 4096  # a cell whose sizes differ each step would make ever more
NUMBERS = 1 << 32  # a call's number in its group is less


@dataclass(frozen=True, slots=True)
class Columns:
    """Arrays of one length, a field each: what has one index in all of them is one thing."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def at(self, chosen: npt.NDArray[np.bool_] | Ints) -> Self:
        """Return what is at these indices, or where the mask is true."""
        return type(self)(*(getattr(self, f.name)[chosen] for f in fields(self)))

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return all of them behind each other."""
        empty = np.zeros(0, np.int64)
        columns = [[getattr(part, f.name) for part in parts] or [empty] for f in fields(cls)]
        return cls(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True, slots=True)
class CallRows(Columns):
    """Calls, one at each index; moments in nanoseconds on one clock.

    `family`, `unit` and `meeting` are numbers of `FamilyIndex`; `freed` is 0 where not known. Calls
    that meet (one collective's of all ranks, a send and its recv) have the same `meeting` and the
    same `number`.
    """

    rank: Ints
    step: Ints
    family: Ints
    meeting: Ints
    number: Ints
    launch: Ints
    begin: Ints
    end: Ints
    freed: Ints
    unit: Ints


@dataclass(frozen=True, slots=True)
class Waits(Columns):
    """When main threads were blocked in collectives, one time at each index; nanoseconds."""

    rank: Ints
    step: Ints
    begin: Ints
    end: Ints


@dataclass(frozen=True, slots=True)
class Family:
    """What a row of the table stands for. Of a message `ranks` are sender and receiver."""

    kind: str
    group: str
    title: str
    ranks: tuple[int, ...]
    line: str
    dtype: str
    bytes: int


class FamilyIndex:
    """Numbers for families and for meetings, and each rank's templates."""

    def __init__(self) -> None:
        self.families: list[Family] = []
        self.units = [""]
        self.sizes: list[int] = []  # of each meeting: its ranks, 0 when they are not known
        self._families: dict[Family, int] = {}
        self._meetings: dict[tuple[object, ...], int] = {}
        # Rank to a template's number to (family, meeting, unit).
        self._known: dict[int, dict[int, tuple[int, int, int]]] = {}
        self._tables: dict[int, Ints] = {}

    def learn(self, rank: int, new: dict[int, Template]) -> None:
        """Take templates that this rank tells for the first time."""
        known = self._known.setdefault(rank, {})
        for number, template in new.items():
            if number < MOST_FAMILIES:
                known[number] = self._place(rank, template)
        self._tables.pop(rank, None)

    def _place(self, rank: int, t: Template) -> tuple[int, int, int]:
        is_message = t.kind in ("send", "recv")
        ends: tuple[int, ...] = t.ranks
        if is_message:
            here_there = (rank,) if t.peer is None else (rank, t.peer)
            ends = here_there if t.kind == "send" else here_there[::-1]
        family = Family(t.kind, t.group, t.title, ends, t.line, t.dtype, t.bytes)
        if family not in self._families:
            if len(self.families) >= MOST_FAMILIES:
                return -1, -1, -1
            self._families[family] = len(self.families)
            self.families.append(family)
        meeting: tuple[object, ...] = (t.group, ends, is_message, t.tag)
        is_whole = len(ends) > 1 or (len(ends) == 1 and not is_message)
        if not is_whole:  # from any source, or a group that torch does not know: meets no rank
            meeting = (*meeting, rank)
        if meeting not in self._meetings:
            self._meetings[meeting] = len(self.sizes)
            self.sizes.append(len(ends) if is_whole else 0)
        if t.unit not in self.units:
            self.units.append(t.unit)
        return self._families[family], self._meetings[meeting], self.units.index(t.unit)

    def table(self, rank: int) -> Ints:
        """Return family, meeting and unit by a template's number; -1 for numbers that were lost."""
        table = self._tables.get(rank)
        if table is None:
            known = self._known.get(rank, {})
            table = np.full((max(known, default=-1) + 1, 3), -1, np.int64)
            for number, place in known.items():
                table[number] = place
            self._tables[rank] = table
        return table


def decode(
    rank: int, sampled: Sequence[tuple[int, Calls]], book: FamilyIndex, offset_ns: int
) -> tuple[CallRows, Waits, int]:
    """Return one rank's calls and waits over some steps, and how many calls were left out.

    A call whose template is not known is left out: the record that told it has been lost.

    Args:
        rank: Whose.
        sampled: Steps and what was recorded of each.
        book: Has learned what is new in `sampled`.
        offset_ns: Added to the rank's moments they are on the common clock.
    """
    bases = np.array([calls.base_ns + offset_ns for _, calls in sampled], np.int64)
    steps = np.array([step for step, _ in sampled], np.int64)
    rows, of_row = _columns([calls.calls for _, calls in sampled], len(CALL))
    waits, of_wait = _columns([calls.waits for _, calls in sampled], len(WAIT))
    template, number, *moments = rows
    table = book.table(rank)
    is_known = template < len(table)
    places = np.full((len(template), 3), -1, np.int64)
    places[is_known] = table[template[is_known]]
    launch, begin, end, freed = (bases[of_row] + moment * TICK_NS for moment in moments)
    every = CallRows(
        rank=np.full(len(template), rank, np.int64),
        step=steps[of_row],
        family=places[:, 0],
        meeting=places[:, 1],
        number=number,
        launch=launch,
        # Whatever clocks and clamping did: nothing begins before it is launched.
        begin=np.maximum(begin, launch),
        end=np.maximum(np.maximum(begin, end), launch),
        freed=np.where(moments[-1] > 0, freed, 0),
        unit=places[:, 2],
    )
    found = every.at(every.family >= 0)
    w_begin, w_end = (bases[of_wait] + moment * TICK_NS for moment in waits)
    blocked = Waits(np.full(len(w_begin), rank, np.int64), steps[of_wait], w_begin, w_end)
    return found, blocked, len(every) - len(found)


def _columns(parts: Sequence["array[int]"], width: int) -> tuple[list[Ints], Ints]:
    """Return the columns of packed rows, and of which part each row is."""
    lengths = [len(part) // width for part in parts]
    whole = [
        np.frombuffer(part, np.dtype(f"u{part.itemsize}"), n * width)
        for part, n in zip(parts, lengths, strict=True)
        if n
    ]
    table = np.concatenate(whole) if whole else np.zeros(0, np.uint32)
    columns = table.reshape(-1, width).T.astype(np.int64)
    return list(columns), np.repeat(np.arange(len(parts)), lengths)
