"""A checkpoint of each layout goes on in each other one, on 1, 2, 4 and 8 ranks.

Weights arrive to the bit; two steps later trainings lie apart by what rounding does. The whole
table is slow; `make test` makes a part of it. After a change, or with another torch, make it anew:

    NBDIST_WRITE_RESHARD_TABLE=1 python -m pytest tests/group/test_reshard.py -m slow
"""

import os
from pathlib import Path

import pytest

from tests.group import checkpoint_ranks
from tests.group.engines import cluster
from tests.group.parity_cases import GATHER, PIPELINE, SAMPLES, WITHIN, Case

FILE = Path(__file__).parent / "reshard_table.md"
STEPS, MORE = 3, 2

WAYS = [
    Case(1, "ddp", dtype="float64"),
    *(Case(2, way, dtype="float64") for way in ("ddp", "zero1", "zero2", "zero3", "tp=2")),
    Case(2, "cp=2", (GATHER,), dtype="float64"),
    Case(2, "pp=2", (PIPELINE,), dtype="float64"),
    *(Case(2, "pp=2", (f'Pipeline("{s}", 4)',), dtype="float64") for s in ("interleaved", "zbv")),
    *(Case(4, way, dtype="float64") for way in ("ddp", "zero1", "zero2", "zero3", "hsdp", "tp=4")),
    *(Case(4, way, dtype="float64") for way in ("dp=2 tp=2", "fsdp=2 tp=2")),
    *(Case(4, f"{way}cp=2", (GATHER,), dtype="float64") for way in ("dp=2 ", "fsdp=2 ")),
    Case(4, "fsdp=2 tp=2 zero2", dtype="float64"),
    *(Case(4, way, (GATHER,), dtype="float64") for way in ("cp=2 tp=2", "cp=4")),
    Case(4, "pp=2 cp=2", (PIPELINE, GATHER), dtype="float64"),
    *(
        Case(4, way, (PIPELINE,), dtype="float64")
        for way in ("pp=2 dp=2", "pp=2 fsdp=2", "pp=2 tp=2")
    ),
    Case(4, "pp=4", ('Pipeline("1f1b", 4)',), dtype="float64"),
    *(Case(8, way, dtype="float64") for way in ("zero3", "dp=2 fsdp=2 tp=2")),
    Case(8, "pp=2 fsdp=2 tp=2", (PIPELINE,), dtype="float64"),
]
EVERY_TIME = [
    case
    for case in WAYS
    if case.policies in ((), (PIPELINE,))
    and (case.ranks, case.layout) in [(1, "ddp"), (2, "zero3"), (2, "pp=2"), (4, "fsdp=2 tp=2")]
]

Table = dict[tuple[Case, Case], float]  # (saved, restored): how far apart, in noise floors


def measure(root: str, ways: list[Case], others: range) -> Table:
    """Save in each layout and restore in others; returns how far each pair lies apart.

    Args:
        root: The folder of the checkpoints.
        ways: The layouts.
        others: How many places further on in `ways` (and round) lies that which has saved.
    """
    by_ranks = {
        n: [case for case in ways if case.ranks == n] for n in sorted({w.ranks for w in ways})
    }
    found: Table = {}
    for n, cases in by_ranks.items():
        with cluster(n) as ranks:
            for chosen in batched(cases, 4):
                ranks.run(checkpoint_ranks.save_each, root, chosen, STEPS, MORE)
    with cluster(1) as ranks:
        (noise,) = ranks.run(checkpoint_ranks.floor, root, ways[0], MORE, SAMPLES)
    for n, cases in by_ranks.items():
        with cluster(n) as ranks:
            for case in cases:
                at = ways.index(case)
                for chosen in batched([ways[(at + o) % len(ways)] for o in others], 4):
                    told = ranks.run(checkpoint_ranks.restore_each, root, chosen, case, MORE)[0]
                    for saved, (is_equal, apart) in zip(chosen, told, strict=True):
                        assert is_equal, f"{saved.way} in {case.way}: weights are not those saved"
                        found[saved, case] = apart / noise
    return found


def batched(cases: list[Case], size: int) -> list[list[Case]]:
    """Return the cases, so many at once: a rank answers in time."""
    return [cases[at : at + size] for at in range(0, len(cases), size)]


def check(found: Table) -> None:
    """Assert that no pair lies further apart than rounding explains."""
    wrong = [
        f"{saved.ranks} {saved.way} -> {case.ranks} {case.way}: {floors:.1f} noise floors"
        for (saved, case), floors in found.items()
        if not floors <= WITHIN
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(300)
def test_a_checkpoint_goes_on_in_other_layouts_and_on_other_ranks(tmp_path: Path) -> None:
    # In the same layout test_checkpoint goes on, bit for bit.
    check(measure(str(tmp_path), EVERY_TIME, range(1, 2)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_layouts_checkpoint_goes_on_in_each_other(tmp_path: Path) -> None:
    found = measure(str(tmp_path), WAYS, range(len(WAYS)))
    if os.environ.get("NBDIST_WRITE_RESHARD_TABLE"):
        FILE.write_text(render(found), "utf-8")
    check(found)


def render(found: Table) -> str:
    """Return the table as Markdown: a row a layout that saved, a column one that went on."""
    names = {case: name_of(case) for case in WAYS}
    lines = [["saved on ↓, goes on on →", *names.values()], ["---"] * (len(names) + 1)]
    for saved in WAYS:
        cells = (found[saved, case] for case in WAYS)
        lines.append([names[saved], *("0" if not one else f"{one:.2g}" for one in cells)])
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def name_of(case: Case) -> str:
    """Return ranks and layout, and the schedule where stages lie otherwise than in 1f1b."""
    schedules = [s for s in ("interleaved", "zbv") if any(s in one for one in case.policies)]
    return " ".join([f"{case.ranks}: {case.layout}", *schedules])


HEAD = f"""# Every layout's checkpoint, in every layout

A GPT in float64, AdamW and a scheduler: {STEPS} steps, `nbdist.save`, and on; `nbdist.restore` in
another layout, and on. In all pairs the restored weights are those saved, to the bit. Cells tell
how far the weights lie apart {MORE} steps later, in units of what rounding alone does (the largest
distance of {SAMPLES} trainings restored with weights half a unit of their last place away); up to
{WITHIN:g} is noise, 0 is bit-equal. The numbers before the layouts are those of the ranks.

"""
