"""A model compiled before or after it is spread: one process's numbers, graphs made once."""

import shutil
from typing import Any

import pytest

from nbdist.engine.compat.torch_hooks import compiles_exchanges
from nbdist.engine.layout.policies.efficiency import ActivationCheckpoint
from nbdist.engine.layout.policies.policies import (
    ContextParallel,
    Pipeline,
    TensorParallel,
)
from tests.group.harness import run_ranks

# The first one waits for all, and compilers are slow where they share cores.
pytestmark = pytest.mark.timeout(300)
RANKS = "tests.group.compile_ranks:"
Case = tuple[Any, ...]  # layout, when it is compiled, backend, policies

MICRO = Pipeline("1f1b", microbatches=2)
CASES: list[Case] = [
    ("zero3", "before", "eager", ActivationCheckpoint(selective=True)),
    ("tp=2", "after", "aot_eager"),
    ("pp=2", "blocks, after", "eager", MICRO),
]
WHEN = ("before", "in place, before", "after", "in place, after")
BLOCKS = ("blocks, before", "blocks, after")
POLICIES: list[Case] = [(), (ActivationCheckpoint(),), (ActivationCheckpoint(selective=True),)]
EVERY: list[Case] = [
    (layout, when, backend, *policies)
    for layout in ("ddp", "zero3")
    for when in WHEN
    for backend in ("eager", "aot_eager", "inductor")
    for policies in POLICIES
    if backend != "inductor" or shutil.which("g++")
]
CUT: list[Case] = [
    *[(layout, when, "aot_eager") for layout in ("tp=2", "cp=2") for when in (*WHEN, *BLOCKS)],
    *[("pp=2", when, "aot_eager", MICRO) for when in (*WHEN[1::2], *BLOCKS)],
    *[("tp=2", when, "aot_eager", ActivationCheckpoint()) for when in BLOCKS],
    *[
        (layout, when, "aot_eager", *policies)
        for layout, *policies in [
            ("tp=2", TensorParallel(sequence=True)),
            ("cp=2", ContextParallel("gather")),
            ("cp=2", ActivationCheckpoint()),
            ("pp=2", MICRO, ActivationCheckpoint()),
        ]
        for when in ("in place, after", "blocks, after")
    ],
]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, RANKS + "on_two_ranks", CASES, timeout_s=240)


def hold(found: dict[str, Any], *, compiles: bool = True) -> None:
    assert found["by"] <= 1e-14
    assert found["names"]
    assert found["same object"]
    assert found["steps"] == 3
    assert found["collectives"] >= 3
    # Neither a step that is looked at nor a new cell compiles anything again.
    assert found["graphs"] == [found["graphs"][0]] * 3
    assert found["graphs"][0] > 0 or not compiles
    # What parallelize tries runs as it is written: a forward on fake tensors is none to compile.
    assert found["compiled for it"] == 0


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(c[:3]) for c in CASES])
def test_a_compiled_model_trains_as_one_process_does_and_is_compiled_once(
    two_ranks: list[dict[str, Any]], number: int
) -> None:
    for found in two_ranks:
        hold(found["trained"][number])


def test_what_would_compile_nothing_or_fail_is_refused_in_words(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        before, after, whole = found["refused"]
        assert 'What torch.compile(model) returns cannot get the layout "pp=2"' in before
        assert "block.compile() for each block" in before
        assert "cannot be called by itself" in after
        assert "compiled as a whole cannot get both tp and ActivationCheckpoint" in whole


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_tp_cp_and_pp_cut_is_compiled_in_every_order_and_trains_as_one_process_does() -> None:
    for rank in run_ranks(2, RANKS + "on_two_ranks", CUT, timeout_s=1100):
        for case, found in zip(CUT, rank["trained"], strict=True):
            is_left_alone = any(isinstance(policy, ActivationCheckpoint) for policy in case[3:])
            is_left_alone |= case[0] == "cp=2" and not compiles_exchanges()
            hold(found, compiles=not is_left_alone)


@pytest.mark.slow
def test_a_compiled_model_drops_what_the_same_one_drops_uncompiled() -> None:
    for found in run_ranks(2, RANKS + "with_dropout", ["tp=2", "cp=2"], timeout_s=300):
        for never, blocks in found.values():
            assert never == blocks


@pytest.mark.slow
def test_every_order_backend_and_checkpoint_trains_as_one_process_does() -> None:
    for rank in run_ranks(2, RANKS + "on_two_ranks", EVERY, timeout_s=900):
        for found in rank["trained"]:
            hold(found)
