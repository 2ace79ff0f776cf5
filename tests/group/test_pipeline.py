"""Pipelines on real ranks: one process's numbers, and wrong use refused in words."""

from functools import cache
from typing import Any

import pytest
import torch

from nbdist.engine.layout.policies import Pipeline
from tests.group.harness import run_ranks

RANKS = "tests.group.pipeline_ranks:"


def by(schedule: str) -> tuple[Pipeline]:
    return (Pipeline(schedule, microbatches=4),)


PURE = [("pp=2", by(schedule)) for schedule in ("1f1b", "gpipe")]


@cache
def pure(model: str) -> list[list[dict[str, Any]]]:
    return run_ranks(2, RANKS + "parity", model, [torch.float32], PURE, None, timeout_s=120)


@pytest.mark.parametrize("model", ["gpt", "conv"])
@pytest.mark.parametrize("case", range(len(PURE)))
def test_a_pipeline_makes_one_process_s_numbers_bit_by_bit(model: str, case: int) -> None:
    ranks = [found[case] for found in pure(model)]
    assert [rank["state"] for rank in ranks] == [0, 0]
    assert [rank["losses"] for rank in ranks if rank["has loss"]] == [0]
    assert [rank["losses"] for rank in ranks if not rank["has loss"]] == [None]


@pytest.mark.parametrize("model", ["gpt", "conv"])
def test_each_parameter_lies_on_one_rank_under_its_own_name(model: str) -> None:
    first, last = (found[0] for found in pure(model))
    assert sorted(first["names"] + last["names"]) == first["all"]
    assert set(first["names"]).isdisjoint(last["names"])
