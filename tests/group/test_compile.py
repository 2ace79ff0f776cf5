"""A model compiled before or after it is spread: one process's numbers, graphs made once."""

import shutil
from typing import Any

import pytest

from nbdist.engine.layout.policies import ActivationCheckpoint
from tests.group.harness import run_ranks

RANKS = "tests.group.compile_ranks:"
Case = tuple[Any, ...]  # layout, when it is compiled, backend, policies

CASES: list[Case] = [
    ("ddp", "before", "eager"),
    ("ddp", "in place, after", "aot_eager", ActivationCheckpoint()),
    ("zero3", "before", "aot_eager"),
    ("zero3", "after", "eager", ActivationCheckpoint(selective=True)),
]
WHEN = ("before", "in place, before", "after", "in place, after")
POLICIES: list[Case] = [(), (ActivationCheckpoint(),), (ActivationCheckpoint(selective=True),)]
EVERY: list[Case] = [
    (layout, when, backend, *policies)
    for layout in ("ddp", "zero3")
    for when in WHEN
    for backend in ("eager", "aot_eager", "inductor")
    for policies in POLICIES
    if backend != "inductor" or shutil.which("g++")
]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, RANKS + "on_two_ranks", CASES, timeout_s=240)


def hold(found: dict[str, Any]) -> None:
    assert found["by"] <= 1e-14
    assert found["names"]
    assert found["same object"]
    assert found["steps"] == 3
    assert found["collectives"] >= 3
    # Neither a step that is looked at nor a new cell compiles anything again.
    assert found["graphs"] == [found["graphs"][0]] * 3
    assert found["graphs"][0] > 0


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(c[:3]) for c in CASES])
def test_a_compiled_model_trains_as_one_process_does_and_is_compiled_once(
    two_ranks: list[dict[str, Any]], number: int
) -> None:
    for found in two_ranks:
        hold(found["trained"][number])


@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "pp=2"])
def test_axes_that_change_a_forward_refuse_a_compiled_model_in_words(
    two_ranks: list[dict[str, Any]], layout: str
) -> None:
    for found in two_ranks:
        assert f'A compiled model cannot get the layout "{layout}"' in found["refused"][layout]
        assert "give the model uncompiled" in found["refused"][layout]


@pytest.mark.slow
def test_every_order_backend_and_checkpoint_trains_as_one_process_does() -> None:
    for rank in run_ranks(2, RANKS + "on_two_ranks", EVERY, timeout_s=900):
        for found in rank["trained"]:
            hold(found)
