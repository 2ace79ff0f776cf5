"""The result of a cell, rank by rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.client.output.slots import Display, Slots


@dataclass(frozen=True, slots=True)
class RankResult:
    """One rank's part of a cell.

    `value` is the value of the cell's last expression: the object itself where it is plain
    (None, bool, number, text, small containers of these, up to 64 KiB), else its repr as text.
    `text` is what the rank printed, in order. `error` is (exception name, message), or None.
    """

    rank: int
    value: Any = None
    text: str = ""
    displays: tuple[Display, ...] = ()
    error: tuple[str, str] | None = None
    seconds: float = 0.0

    def show(self) -> None:
        """Display this rank's text and rich outputs in full."""
        text = [Display({"text/plain": self.text})] if self.text else []
        Slots(live=False).settle([*text, *self.displays])


@dataclass(frozen=True, slots=True)
class CellResult(Mapping[int, RankResult]):
    """A cell's results by rank: `result[2].value`, `result.value_list`, `result.ok`."""

    by_rank: Mapping[int, RankResult] = field(default_factory=dict)

    def __getitem__(self, rank: int) -> RankResult:
        if rank not in self.by_rank:
            raise KeyError(f"{rank!r} is none of this cell's ranks, which are {[*self.by_rank]}")
        return self.by_rank[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_rank)

    def __len__(self) -> int:
        return len(self.by_rank)

    @property
    def ok(self) -> bool:
        """Whether no rank failed."""
        return all(part.error is None for part in self.by_rank.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ran the cell, ascending."""
        return tuple(self.by_rank)

    @property
    def value_list(self) -> list[Any]:
        """The values, one entry per rank."""
        return [part.value for part in self.by_rank.values()]

    def __repr__(self) -> str:
        lines = []
        for part in self.by_rank.values():
            said = ": ".join(filter(None, part.error)) if part.error else repr(part.value)
            lines.append(f"rank {part.rank}: {said}")
        return "\n".join(lines) or "no ranks"
