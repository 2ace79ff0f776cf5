"""Training in rounds: what comes out is DDP's, or a simulation's of n workers in one process."""

from functools import cache
from typing import Any

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.averaging_ranks:"
# The noise floor in float64 of another order of summation; that of losses is relative.
LOSS, PARAMETERS = 8.9e-16, 2.7e-15


@cache
def on_two(function: str) -> list[Any]:
    return [found[function] for found in everything()]


@cache
def everything() -> list[dict[str, Any]]:
    return run_ranks(2, RANKS + "everything", timeout_s=90)


@pytest.mark.parametrize(
    "name", [pytest.param("LocalSGD", marks=pytest.mark.slow), "LocalSGD, warm-up", "DiLoCo"]
)
def test_averaging_after_every_step_of_plain_sgd_is_ddp(name: str) -> None:
    for found in on_two("oracles"):
        assert found[f"{name}: loss"] <= LOSS
        assert found[f"{name}: parameters"] <= PARAMETERS


@pytest.mark.parametrize("name", ["every=3", "DiLoCo every=4", "statistics"])
def test_rounds_of_many_steps_are_what_one_process_makes_of_two_workers(name: str) -> None:
    for found in on_two("oracles"):
        assert found[name] <= 1e-13


def test_averages_inside_pairs_and_over_all_are_what_one_process_makes_of_four_workers() -> None:
    for seen in run_ranks(4, RANKS + "hierarchical"):
        assert seen["difference"] <= 1e-14
        assert seen["pairs"] == [True, True, False, False]  # after step 4, in pairs
        assert seen["groups made again"] == 0
        assert "LocalSGD(SGD, every=2, between=6, group_size=2)" in seen["repr"]
        assert "there is nothing between hosts" in seen["one host"]
        assert "group_size=2" in seen["one host"]


@pytest.mark.slow
def test_diloco_on_four_ranks_is_what_one_process_makes_of_four_workers() -> None:
    assert max(run_ranks(4, RANKS + "diloco_in_many")) <= 1e-13


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
def test_averaging_every_fourth_step_sends_a_quarter_of_ddps_bytes(kind: str) -> None:
    for counted in on_two("bytes_sent"):
        assert counted[kind] == 2 * counted["parameters"]
        # DDP also compares its parameters' shapes once, in a few hundred bytes.
        assert counted["ddp"] == pytest.approx(8 * counted["parameters"], rel=0.01)


def test_a_wrapper_is_an_optimizer_for_schedulers_checkpoints_closures_and_scalers() -> None:
    for claims in on_two("looks_like_an_optimizer"):
        assert claims["steps counted"] == 6
        assert claims["rate inside"] == pytest.approx(1e-3 / 8)
        assert claims["resumed"] == 0
        assert claims["closure"] <= PARAMETERS
        # Four steps of 0.1 on rank 0, three on rank 1, which left one out; unscaled.
        assert claims["scaler: moved"] == pytest.approx(0.35)
        assert claims["scaler: steps"] == 4
        assert claims["equal after end_round"] is True
        assert claims["repr"].startswith("<LocalSGD(SGD, every=8): averages")
        assert claims["repr"].endswith("and 16 running statistics>")


def test_what_does_not_fit_is_refused_with_the_reason_on_every_rank() -> None:
    for said in on_two("wrong_use"):
        assert "needs a plain model" in said["ddp"]
        assert 'by the layout "ddp"' in said["ddp"]
        assert 'by the layout "zero3"' in said["zero3"]
        assert "wrapped already, by LocalSGD" in said["twice"]
        assert "needs a plain model" in said["spread later"]
        assert "wraps an optimizer, not a GPT" in said["no optimizer"]
        assert "1 or more, not 0" in said["every=0"]
        assert "use between=8" in said["between"]
        assert "Ranks 0 and 1 have different models" in said["models"]
        assert "Rank 0 asks for DiLoCo(SGD, every=4" in said["asked"]
