"""Which layouts test_parity proves, and the table that it writes. Pure: no torch.

Made anew by `NBDIST_WRITE_PARITY_TABLE=1 python -m pytest -m "" tests/group/test_parity.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import nbdist

FILE = Path(__file__).parent / "parity_table.md"

SEQUENCE, LOSS = "TensorParallel(sequence=True)", "TensorParallel(loss=True)"
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
PIPELINE = 'Pipeline("1f1b", 2)'
ULYSSES, GATHER = 'ContextParallel("ulysses")', 'ContextParallel("gather")'
CHECKPOINT = "ActivationCheckpoint()"
MODELS, DTYPES = ("gpt", "conv", "llama"), ("float32", "float64")

POLICIES: dict[str, Callable[[], Any]] = {
    "TensorParallel(sequence=True)": lambda: nbdist.TensorParallel(sequence=True),
    "TensorParallel(loss=True)": lambda: nbdist.TensorParallel(loss=True),
    'ContextParallel("ulysses")': lambda: nbdist.ContextParallel("ulysses"),
    'ContextParallel("gather")': lambda: nbdist.ContextParallel("gather"),
    "ActivationCheckpoint()": lambda: nbdist.ActivationCheckpoint(),
    **{
        f'Pipeline("{schedule}", {count})': partial(nbdist.Pipeline, schedule, count)
        for schedule in SCHEDULES
        for count in (2, 4)
    },
}

# Two right ways to add up lie a few noise floors apart. Where one number differs most, samples of
# its rounding are like normal numbers: one is 8 times as large as another in 8 % of all cases, and
# 6 times as large as the largest of six in less than 1 of 10 000.
SAMPLES, WITHIN = 6, 6.0


@dataclass(frozen=True, slots=True)
class Case:
    """One training under a layout.

    Attributes:
        ranks: How many.
        layout: The text.
        policies: Calls in the words of the interface, as `"TensorParallel(sequence=True)"`.
        model: "gpt", "conv" or "llama".
        dtype: "float32" or "float64".
        accumulate: Parts of a step.
        clip: Whether gradients are clipped to a norm that they exceed.
    """

    ranks: int
    layout: str
    policies: tuple[str, ...] = ()
    model: str = "gpt"
    dtype: str = "float32"
    accumulate: int = 1
    clip: bool = False

    @property
    def microbatches(self) -> int:
        """Of a pipeline; 1 without one."""
        found = (
            policy.microbatches or 8 for policy in policies_of(self) if hasattr(policy, "schedule")
        )
        return next(found, 1)

    @property
    def way(self) -> str:
        """What a user would write, in short."""
        words = [f'"{self.layout}"', *self.policies]
        words += [f"accumulate({self.accumulate})"] if self.accumulate > 1 else []
        words += ["clipped"] if self.clip else []
        return ", ".join(words)

    @property
    def is_bitwise_anywhere(self) -> bool:
        """Whether it adds the same numbers in the same order as one process, by the same kernels.

        What tp and cp cut, and norms of cut gradients, are added in another order: that no bit
        differs is then the luck of one kind of CPU.
        """
        is_cut = any(axis in self.layout for axis in ("tp=", "cp="))
        return not is_cut and not (self.clip and self.layout != "ddp")

    @property
    def column(self) -> str:
        """Which of the table's columns this is."""
        return f"{self.model} {self.dtype}"


# Every way to spread over so many ranks.
WAYS = [
    *(Case(2, layout) for layout in ("ddp", "zero1", "zero2", "zero3", "tp=2")),
    Case(2, "tp=2", (SEQUENCE,)),
    Case(2, "tp=2", (LOSS,)),
    *(Case(2, layout, accumulate=2) for layout in ("ddp", "zero2", "zero3")),
    *(Case(2, layout, clip=True) for layout in ("ddp", "zero3", "tp=2")),
    *(Case(2, layout, (CHECKPOINT,)) for layout in ("ddp", "zero3")),
    *(Case(2, "cp=2", (policy,)) for policy in (ULYSSES, GATHER)),
    Case(2, "cp=2", (ULYSSES, CHECKPOINT)),
    Case(2, "cp=2", clip=True),
    Case(2, "cp=2", accumulate=2),
    *(Case(2, "pp=2", (f'Pipeline("{schedule}", 4)',)) for schedule in SCHEDULES),
    Case(2, "pp=2", (PIPELINE,), clip=True),
    Case(2, "pp=2", (PIPELINE,), accumulate=2),
    *(Case(2, "pp=2", (f'Pipeline("{s}", 4)', CHECKPOINT)) for s in ("1f1b", "zbv")),
    *(Case(4, layout) for layout in ("ddp", "zero1", "zero2", "zero3", "hsdp", "tp=4")),
    *(Case(4, f"pp=2 {layout}", (PIPELINE,)) for layout in ("dp=2", "fsdp=2", "tp=2")),
    *(Case(4, "cp=4", (policy,)) for policy in (ULYSSES, GATHER)),
    *(Case(4, layout, (GATHER,)) for layout in ("dp=2 cp=2", "fsdp=2 cp=2", "cp=2 tp=2")),
    Case(4, "pp=4", (PIPELINE,)),
    *(Case(4, "pp=2 cp=2", (PIPELINE, policy)) for policy in (ULYSSES, GATHER)),
    Case(4, "pp=2 cp=2", (PIPELINE, ULYSSES, CHECKPOINT), clip=True),
    Case(4, "pp=2 fsdp=2", (PIPELINE,), clip=True),
    *(Case(4, layout) for layout in ("dp=2 tp=2", "fsdp=2 tp=2", "fsdp=2 tp=2 zero2")),
    Case(4, "fsdp=2 tp=2", (SEQUENCE,)),
    Case(4, "fsdp=2 tp=2", (SEQUENCE, LOSS)),
    Case(4, "dp=2 fsdp=2", clip=True),
    Case(4, "fsdp=2 tp=2", clip=True),
    *(Case(8, layout) for layout in ("ddp", "zero2", "zero3", "dp=2 fsdp=4", "dp=4 fsdp=2")),
    *(Case(8, layout) for layout in ("dp=2 fsdp=2 tp=2", "fsdp=4 tp=2", "fsdp=2 tp=4")),
    Case(8, "dp=2 fsdp=2 tp=2", clip=True),
    *(Case(8, layout, (GATHER,)) for layout in ("fsdp=2 cp=2 tp=2", "dp=2 fsdp=2 cp=2")),
    *(Case(8, layout, (PIPELINE,)) for layout in ("pp=2 fsdp=2 tp=2", "pp=4 dp=2", "pp=2 hsdp")),
    Case(8, "pp=2 dp=2 tp=2", (PIPELINE,), clip=True),
    *(Case(8, layout, (PIPELINE, GATHER)) for layout in ("pp=2 cp=2 tp=2", "pp=2 fsdp=2 cp=2")),
]

# What `make test` proves each time, beside the other tests of layouts.
EVERY_TIME = [
    Case(2, "ddp", accumulate=2, dtype="float64"),
    Case(2, "pp=2", ('Pipeline("interleaved", 4)',), model="llama"),
    Case(4, "hsdp", model="conv"),
]


def matrix() -> Iterator[Case]:
    """Yield every way, for each model and dtype."""
    for case in WAYS:
        for model in MODELS:
            for dtype in DTYPES:
                yield replace(case, model=model, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a training lies from one process on the same split; or why it cannot be.

    Attributes:
        loss: Largest difference of a step's loss.
        parameters: Largest difference of a parameter after the last step.
        loss_floor: What rounding alone does to the loss.
        parameters_floor: The same of parameters.
        worst: The parameter that differs most.
        refused: What the error says first; else nothing.
    """

    loss: float = 0.0
    parameters: float = 0.0
    loss_floor: float = 0.0
    parameters_floor: float = 0.0
    worst: str = ""
    refused: str = ""

    @property
    def verdict(self) -> str:
        """The word of the table: `bit-equal`, `noise floor`, `refused`, or `DIFFERS`."""
        if self.refused:
            return "refused"
        if self.loss == self.parameters == 0.0:
            return "bit-equal"
        is_near = self.loss <= WITHIN * self.loss_floor
        return (
            "noise floor"
            if is_near and self.parameters <= WITHIN * self.parameters_floor
            else "DIFFERS"
        )

    def __str__(self) -> str:
        if self.verdict in ("bit-equal", "refused"):
            return self.verdict
        return f"{self.verdict}: {self.loss:.1e} / {self.parameters:.1e}"


def policies_of(case: Case) -> list[Any]:
    """Return the policies themselves; on a rank."""
    return [POLICIES[text]() for text in case.policies]


Cells = dict[tuple[int, str, str], str]  # (ranks, layout, column): what the table's cell says


def cells_of(measured: dict[Case, Outcome]) -> Cells:
    """Return the cells that these outcomes make."""
    return {(case.ranks, case.way, case.column): str(found) for case, found in measured.items()}


def render(cells: Cells, torch: str, date: str) -> str:
    """Return the table as Markdown: a row a layout, a column a model and dtype."""
    columns = sorted({column for _, _, column in cells})
    ways = dict.fromkeys((case.ranks, case.way) for case in WAYS)
    lines = [["ranks", "layout", *columns], ["---"] * (len(columns) + 2)]
    lines += [
        [str(ranks), way, *(cells.get((ranks, way, column), "") for column in columns)]
        for ranks, way in ways
        if any((ranks, way, column) in cells for column in columns)
    ]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{_HEAD.format(torch=torch, date=date, within=WITHIN, samples=SAMPLES)}\n{table}"


def parse(text: str) -> Cells:
    """Return the cells of a table that `render` has written."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    if not lines:
        return {}
    (_, _, *columns), _, *rows = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in lines
    ]
    return {
        (int(ranks), way, column): cell
        for ranks, way, *cells in rows
        for column, cell in zip(columns, cells, strict=True)
        if cell
    }


def is_as_expected(case: Case, verdict: str, expected: str | None) -> bool:
    """Return whether a verdict is the table's, which another CPU may have made."""
    right = {"bit-equal", "noise floor"}
    return verdict == expected or (not case.is_bitwise_anywhere and {verdict, expected} == right)


def verdict_in(cell: str) -> str:
    """Return the verdict that a cell of the table begins with."""
    return cell.split(":")[0]


_HEAD = """# Every layout against one process

Four AdamW steps under each layout, and the same four in one process that sums the gradients of the
same parts of the batch. Cells tell the largest difference of a step's loss / of a parameter at the
end.

- **bit-equal**: no bit differs, in losses and parameters.
- **noise floor**: at most {within:g} times what rounding alone does: the largest distance between
  one process and {samples} more that begin with weights half a unit of their last place away, and
  for float32 one in float64. On another kind of CPU the figures are others, and what tp and cp cut
  or a clipped norm adds may be bit-equal or not.
- **refused**: `parallelize` says in one sentence why this model cannot be spread that way.

Made by `test_parity.py` on {date}, torch {torch}, gloo, on CPUs. The test compares each run with
this file and says how to write it anew.
"""
