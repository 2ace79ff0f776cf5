"""One step with parameters in shards: which were gathered, freed and reduced when. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nbdist.client.metrics.analysis.values import Analysis, CollectiveRow, Span
from nbdist.shared.text import counted, figure, name_bytes

_KINDS = {"all_gather": "gathered", "reduce_scatter": "reduced", "all_reduce": "reduced"}
GATHERS = "gathered", "again"
_WORDS = {"again": "gathered again", "reduced": "gradients reduced"}


@dataclass(frozen=True, slots=True)
class UnitRun:
    """What a unit's parameters did, from when to when; milliseconds since the step's begin.

    `kind` is "gathered", "again" (for backward), "whole" (between a gather and its end), or
    "reduced" (their gradients).
    """

    unit: str
    kind: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class ShardStep:
    """A step as one rank of `n` measured it; `bytes` of each unit's whole parameters, by name."""

    step: int
    rank: int
    n: int
    length_ms: float
    bytes: dict[str, int]
    runs: tuple[UnitRun, ...]

    @property
    def most(self) -> float:
        """The greatest share of the bytes that was whole, or being gathered, at a time."""
        pairs = [(a, b) for a, b in pairwise(self.runs) if a.kind in GATHERS]  # what follows: whole
        held = (
            sum(self.bytes[a.unit] for a, b in pairs if a.begin_ms <= at.begin_ms < b.end_ms)
            for at, _ in pairs
        )
        return max(held) / sum(self.bytes.values())

    def __str__(self) -> str:
        """Return it in words: two sentences, and a line a unit."""
        said = (
            f"Step {self.step} with parameters in shards on {counted(self.n, 'rank')}, as rank "
            f"{self.rank} measured it: {figure(self.length_ms)} ms, at most {self.most:.0%} of "
            f"{name_bytes(sum(self.bytes.values()))} whole at a time. That a rank keeps 1/{self.n} "
            "of all is the algorithm's."
        ).replace("%", " %")
        return "\n".join([said, *map(self._line, self.bytes)])

    def _line(self, unit: str) -> str:
        parts = [
            f"freed {figure(run.end_ms)}"
            if run.kind == "whole"
            else f"{_WORDS.get(run.kind, run.kind)} {figure(run.begin_ms)}-{figure(run.end_ms)}"
            for run in self.runs
            if run.unit == unit and (run.kind != "whole" or run.end_ms < self.length_ms)
        ]
        return f"{unit} ({name_bytes(self.bytes[unit])}): {', '.join(parts)} ms"


def shards_of(analysis: Analysis) -> ShardStep | None:
    """Return the newest step in which a rank gathered parameters of FSDP2; None without one."""
    line, table = analysis.line, analysis.table
    for step, begin, end in reversed(line.steps if line else ()):
        for lane in line.lanes if line else ():
            inside = [s for s in lane.spans if s.unit and begin <= s.launch_ms < end]
            gathers = [s for s in inside if table[s.row].kind == "all_gather"]
            if gathers:
                n = len(table[gathers[0].row].ranks)
                sizes = {s.unit: n * table[s.row].bytes for s in gathers}
                runs = _runs([s for s in inside if s.unit in sizes], table, begin, end)
                return ShardStep(step, lane.rank, n, end - begin, sizes, tuple(runs))
    return None


def _runs(
    spans: Sequence[Span], table: Sequence[CollectiveRow], begin: float, end: float
) -> Iterator[UnitRun]:
    """Yield what units did in a step, in the order of launches."""
    once: set[str] = set()  # gathered for a forward whose backward has not come
    for span in spans:
        over = span.end_ms - begin
        kind = _KINDS[table[span.row].kind]
        if kind == "gathered":
            kind = "again" if span.unit in once else kind
            once ^= {span.unit}
        else:
            once.discard(span.unit)
        yield UnitRun(span.unit, kind, span.begin_ms - begin, over)
        if kind in GATHERS:
            freed = end if span.freed_ms is None else span.freed_ms
            yield UnitRun(span.unit, "whole", over, max(over, freed - begin))
