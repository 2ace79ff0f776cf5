"""Pipelines on real ranks: one process's numbers, and wrong use refused in words."""

from functools import cache
from typing import Any

import pytest
import torch

from nbdist.engine.layout.policies import Pipeline, TensorParallel
from tests.group.harness import run_ranks

RANKS = "tests.group.pipeline_ranks:"


def by(schedule: str) -> tuple[Pipeline]:
    return (Pipeline(schedule, microbatches=4),)


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
PURE = {
    "gpt": [("pp=2", by(schedule)) for schedule in SCHEDULES],
    "conv": [("pp=2", by("1f1b"))],
}
CASES = [(model, case) for model, cases in PURE.items() for case in range(len(cases))]


@cache
def pure(model: str) -> list[list[dict[str, Any]]]:
    return run_ranks(2, RANKS + "parity", model, [torch.float32], PURE[model], None, timeout_s=120)


@pytest.mark.parametrize(("model", "case"), CASES)
def test_a_pipeline_makes_one_process_s_numbers_bit_by_bit(model: str, case: int) -> None:
    ranks = [found[case] for found in pure(model)]
    assert [rank["state"] for rank in ranks] == [0, 0]
    assert [rank["losses"] for rank in ranks if rank["has loss"]] == [0]
    assert [rank["losses"] for rank in ranks if not rank["has loss"]] == [None]


@pytest.mark.parametrize("model", PURE)
def test_each_parameter_lies_on_one_rank_under_its_own_name(model: str) -> None:
    first, last = (found[0] for found in pure(model))
    assert sorted(first["names"] + last["names"]) == first["all"]
    assert set(first["names"]).isdisjoint(last["names"])


# Largest differences that come from the order of summation alone, of clipped AdamW steps.
FLOOR = {torch.float32: 2e-5, torch.float64: 1e-12}
SEQUENCE = TensorParallel(sequence=True, loss=True)

# (model, ranks, dtype, cases): what `make test` runs, and the rest of the matrix.
EVERY_TIME = [
    ("gpt", 4, torch.float64, [(f"pp=2 {axis}=2", by("1f1b")) for axis in ("dp", "fsdp", "tp")])
]
SLOW = [
    (
        "gpt",
        4,
        dtype,
        [(f"pp=2 {axis}=2", by(s)) for axis in ("dp", "fsdp", "tp") for s in SCHEDULES],
    )
    for dtype in FLOOR
]
SLOW += [
    ("gpt", 4, torch.float64, [("pp=-1", by("1f1b")), ("pp=2 tp=2", (*by("zbv"), SEQUENCE))]),
    ("conv", 4, torch.float64, [("pp=2 dp=2", by("1f1b")), ("pp=2 fsdp=2", by("zbv"))]),
    ("llama", 2, torch.float64, [("pp=2", by("1f1b")), ("pp=2", by("gpipe"))]),
    ("llama", 4, torch.float64, [("pp=2 tp=2", by("1f1b")), ("pp=2 fsdp=2", by("1f1b"))]),
    (
        "gpt",
        8,
        torch.float64,
        [
            ("pp=2 fsdp=2 tp=2", by("1f1b")),
            ("pp=2 dp=2 tp=2", by("zbv")),
            ("pp=2 dp=2 fsdp=2", by("interleaved")),
            ("pp=4 fsdp=2", by("1f1b")),
        ],
    ),
]
MATRIX = [*EVERY_TIME, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("model", "ranks", "dtype", "cases"), MATRIX)
def test_it_trains_and_clips_beside_other_axes_as_one_process_does(
    model: str, ranks: int, dtype: torch.dtype, cases: list[Any]
) -> None:
    max_norm = None if model == "conv" else 0.5
    for found in run_ranks(ranks, RANKS + "parity", model, [dtype], cases, max_norm, timeout_s=400):
        for case in found:
            worst = max(case["state"], case["norms"], case["losses"] or 0)
            assert worst <= FLOOR[dtype]
            assert (case["losses"] is not None) == case["has loss"]
