"""What an estimate says without a cluster is what ranks are then measured to hold and send.

`NBDIST_WRITE_ESTIMATE_TABLE=1 python -m pytest -m slow tests/group/test_estimates.py` writes
`estimate_table.md` anew.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.group.harness import run_ranks

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("estimate_table.md")
WRITES = bool(os.environ.get("NBDIST_WRITE_ESTIMATE_TABLE"))
RANKS = "tests.group.estimate_ranks:"
STATES, PEAK, BYTES = 0.01, 0.10, 0.01  # largest relative differences

Case = tuple[str, str, str]  # model, layout, policy
FOUR = [
    ("decoder", "fsdp=2 tp=2", ""),
    pytest.param(("decoder", "ddp", "compress between"), marks=pytest.mark.slow),
]
TWO: list[Case] = [
    ("decoder", "ddp", ""),
    ("decoder", "zero1", ""),
    ("decoder", "zero2", ""),
    ("decoder", "zero3", ""),
    ("decoder", "zero3", "checkpoint"),
    ("decoder", "tp=2", ""),
    ("decoder", "cp=2", ""),
    ("decoder", "pp=2", ""),
    ("mlp", "ddp", ""),
    ("mlp", "zero3", ""),
    ("frozen", "ddp", ""),
    ("frozen", "zero3", ""),
    ("decoder", "ddp", "bf16 reduced"),
    ("decoder", "ddp", "compress bf16"),
    ("decoder", "ddp", "compress fp16 alone"),
    ("decoder", "ddp", "compress powersgd"),
    ("mixture", "ep=2", ""),
    ("mixture", "ep=2", "checkpoint"),
]
SHARED = ["ddp", "zero1", "zero2", "hsdp"]

HEAD = """\
# Estimates beside measurements

Bytes of the heaviest of two CPU ranks: estimated / measured. Made by `test_estimates.py`.

| model | layout | states | peak | collectives | payload a step |
| --- | --- | --- | --- | --- | --- |
"""


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    """What the tests found; written where that is asked."""
    found: list[str] = []
    yield found
    if WRITES:
        TABLE.write_text(HEAD + "".join(found))


def _row(case: Case, estimated: dict[str, Any], measured: list[dict[str, Any]]) -> str:
    own = max(measured, key=lambda rank: rank["peak"])
    held = max(estimated["ranks"], key=lambda rank: rank[3])
    pairs = [
        (sum(held[:3]), own["parameters"] + own["gradients"] + own["optimizer"]),
        (held[3], own["peak"]),
        (estimated["traffic"][0], own["count"]),
        (estimated["traffic"][1], own["payload"]),
    ]
    cells = [case[0], " ".join(case[1:]).strip(), *(f"{a:,} / {b:,}" for a, b in pairs)]
    return f"| {' | '.join(cells)} |\n"


def _check(estimated: dict[str, Any], measured: list[dict[str, Any]]) -> None:
    for place, held in enumerate(estimated["ranks"]):
        own = measured[place * len(measured) // len(estimated["ranks"])]
        states = own["parameters"], own["gradients"], own["optimizer"]
        assert held[:3] == pytest.approx(states, rel=STATES)
        assert held[3] == pytest.approx(own["peak"], rel=PEAK)
    heaviest = max(measured, key=lambda own: own["peak"])
    count, payload = estimated["traffic"]
    assert count == heaviest["count"]
    assert payload == pytest.approx(heaviest["payload"], rel=BYTES)


@pytest.mark.parametrize("case", FOUR)
def test_an_estimate_is_what_four_ranks_hold_and_send(case: Case) -> None:
    (estimated,) = run_ranks(1, RANKS + "estimated", 4, [case])
    _check(estimated[0], [rank[0] for rank in run_ranks(4, RANKS + "measured", [case])])


@pytest.mark.slow
def test_the_peak_of_a_dry_cell_is_what_two_ranks_allocate() -> None:
    layouts = ["ddp", "zero3"]
    (dry,) = run_ranks(1, RANKS + "peaks_of_dry_cells", layouts)
    for measured in run_ranks(2, RANKS + "peaks_of_cells", layouts):
        assert dry == pytest.approx(measured, rel=PEAK)


@pytest.mark.parametrize(
    "layout", ["zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in SHARED)]
)
def test_an_estimate_of_many_ranks_runs_no_more_than_one_of_few(layout: str) -> None:
    asked = f"import {RANKS[:-1]} as ranks; print(*ranks.operations({layout!r}, [8, 512]))"
    run = subprocess.run(
        [sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    few, many = map(int, run.stdout.split()[-2:])
    assert 1000 < many <= few, run.stderr


@pytest.mark.slow
def test_what_cannot_be_estimated_is_refused_in_words() -> None:
    ((deciding, built, other_ranks, offloaded, fails, none, elsewhere),) = run_ranks(
        1, RANKS + "refused"
    )
    assert "decides by the numbers in a tensor" in deciding
    assert "super().forward(x if x.sum() > 0 else -x) needs them" in deciding
    assert "lambda: Model(config)" in built
    assert "dp=3" in other_ranks
    assert "There is no estimate with Offload yet." in offloaded
    assert "The factory made no model: ValueError: no such file" in fails
    assert "The factory made no model, but a NoneType." in none
    assert "No module named 'nowhere'" in elsewhere
    assert "have the module's folder in sys.path" in elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO, ids=" ".join)
def test_estimates_are_what_two_ranks_hold_and_send(case: Case, rows: list[str]) -> None:
    (estimated,) = run_ranks(1, RANKS + "estimated", 2, [case])
    measured = [rank[0] for rank in run_ranks(2, RANKS + "measured", [case])]
    rows.append(_row(case, estimated[0], measured))
    _check(estimated[0], measured)
