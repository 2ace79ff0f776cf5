"""Where two layouts of one model part, by what the ranks have found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from nbdist.client.metrics.numerics.distances import (
    Curve,
    Distance,
    around,
    first_beyond,
    shown,
    table,
)
from nbdist.shared.text import counted, name_ranks

_NAMES: Final = ("ddp", "zero1", "zero2", "zero3", "hsdp")


def is_layout(text: str) -> bool:
    """Return whether a word is the text of a layout, and no run's name."""
    return text in _NAMES or "=" in text


@dataclass(frozen=True, slots=True)
class LookedLayout:
    """One layout, held against one process.

    Attributes:
        name: Its text.
        is_bit_equal: Whether no distance was found.
        distances: From one process, in the order of computation: of each tensor that of the rank
            which is furthest off.
        ranks: Those that have the first difference.
        loss: Of the layout and of one process, the mean over the parts of the batch; None: unknown.
        parts: Outputs of which a rank has a part alone, so that they are not compared.
        unkept: Outputs beyond the bound of what is kept.
        terms: Under which both computed, such as "in bf16".
        notes: Further remarks.
        one_piece: How the batch in one piece differs from the mean of its parts; "" if not.
    """

    name: str
    is_bit_equal: bool
    distances: tuple[Distance, ...]
    ranks: tuple[int, ...]
    loss: tuple[float, float] | None
    parts: tuple[str, ...]
    unkept: int
    terms: tuple[str, ...]
    notes: tuple[str, ...]
    one_piece: str

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """Return what a rank has answered."""
        return cls(
            answer["name"],
            answer["is_bit_equal"],
            tuple(Distance(what, name, 1, rank, *n) for what, name, rank, *n in answer["places"]),
            tuple(answer["ranks"]),
            None if answer["loss"] is None else tuple(answer["loss"]),
            tuple(answer["parts"]),
            answer["unkept"],
            tuple(answer["terms"]),
            tuple(answer["notes"]),
            answer["one_piece"] or "",
        )

    @property
    def first(self) -> Distance | None:
        """The first place that round-off does not explain."""
        at = first_beyond(self.distances)
        return None if at is None else self.distances[at]

    @property
    def verdict(self) -> str:
        """What was found, in a sentence."""
        terms = "".join(f", {term}" for term in self.terms)
        compared = [
            f"{counted(sum(one.what == what for one in self.distances), what)}"
            for what in ("output", "gradient")
        ]
        if self.first is None:
            how = "equal bit for bit" if self.is_bit_equal else "equal within round-off"
            return f"{how}: {' and '.join(compared)}, and the loss{terms}"
        by, _, limit = shown(self.first).removesuffix(" <").partition(" of ")
        off = f"by {by}, where {limit} may be round-off" if limit else by
        ranks = name_ranks(self.ranks or (self.first.rank,))
        return f"parts at {self.first.place} on {ranks}, {off}{terms}"

    @property
    def left_out(self) -> str:
        """What was not compared, in a sentence; "" if all was."""
        said = []
        if self.parts:
            more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
            said.append(f"of {self.parts[0]}{more} a rank has a part alone")
        if self.unkept:
            said.append(f"{counted(self.unkept, 'output')} did not fit into what is kept")
        return f"{self.name}: {'; '.join(said)}, which was not compared." if said else ""


@dataclass(frozen=True, slots=True)
class LayoutDiff:
    """Two layouts of one model, each held against one process; print it to read it.

    Attributes:
        one: The first.
        other: The second.
        samples: Of the batch, over all ranks.
        batch: Where it comes from.
    """

    one: LookedLayout
    other: LookedLayout
    samples: int
    batch: str

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """Return what the ranks have answered."""
        one, other = map(LookedLayout.of, answer["layouts"])
        return cls(one, other, answer["samples"], answer["batch"])

    @property
    def ok(self) -> bool:
        """Whether both compute what one process does, and the same loss."""
        return self.one.first is None and self.other.first is None and not self.split_differs

    @property
    def split_differs(self) -> bool:
        """Whether one process computes another loss from the parts of one than of the other."""
        if self.one.loss is None or self.other.loss is None:
            return False
        a, b = self.one.loss[1], self.other.loss[1]
        limits = [d.limit for side in self.sides for d in side.distances if d.what == "loss"]
        return abs(a - b) > max([*limits, 1e-5 * max(abs(a), abs(b))])

    @property
    def sides(self) -> tuple[LookedLayout, LookedLayout]:
        """Both."""
        return self.one, self.other

    @property
    def curves(self) -> list[Curve]:
        """What a picture shows."""
        return [Curve(side.name, side.distances) for side in self.sides]

    @property
    def sentences(self) -> list[str]:
        """What was found, shortest first."""
        said = [f"{side.name}: {side.verdict}." for side in self.sides]
        if self.split_differs:
            assert self.one.loss is not None, "it is known of both"
            assert self.other.loss is not None, "it is known of both"
            pieces = next((side.one_piece for side in self.sides if side.one_piece), "")
            said.append(
                f"One process has the loss {self.one.loss[1]:.6g} on the parts of {self.one.name}, "
                f"and {self.other.loss[1]:.6g} on those of {self.other.name}: the batch is cut "
                "otherwise, and the loss, or a layer as batch norm, depends on the cut"
                + (f" ({pieces})." if pieces else ".")
            )
        elif self.ok:
            said.append(
                "Both compute what one process does. What differs in a training lies in the data, "
                "the loop or the optimizer: layout.verify(..., optimizer=opt), or %dist diff of "
                "two runs."
            )
        return said

    def __str__(self) -> str:
        title = (
            f"{self.one.name} and {self.other.name}, one step on the same {self.samples} samples "
            "and weights, each against one process on its parts of the batch:"
        )
        lines = [title, *(f"  {text}" for text in self.sentences), *self._table()]
        notes = dict.fromkeys(note for side in self.sides for note in side.notes)
        left_out = [side.left_out for side in self.sides if side.left_out]
        return "\n".join([*lines, *(f"  {text}" for text in (*left_out, *notes, self.batch))])

    __repr__ = __str__

    def _table(self) -> list[str]:
        places = _in_order([side.distances for side in self.sides])
        by_place = [{(one.what, one.name): one for one in side.distances} for side in self.sides]
        first = next(
            (
                at
                for at, place in enumerate(places)
                if any(place in known and known[place].is_beyond for known in by_place)
            ),
            None,
        )
        if first is None:
            return []
        rows = [
            [what, name, *(shown(known.get((what, name))) for known in by_place)]
            for what, name in (places[at] for at in around(len(places), first))
        ]
        return table(["what", "of", *(side.name for side in self.sides)], rows)


def _in_order(sides: Sequence[Sequence[Distance]]) -> list[tuple[str, str]]:
    """Return the places of both, in the order of the one that has more."""
    longer, shorter = sorted(sides, key=len, reverse=True)
    return list(dict.fromkeys((one.what, one.name) for one in [*longer, *shorter]))
