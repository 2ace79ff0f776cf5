"""Adapters on weights that torchao has quantized: right under a layout, or refused in words."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from tests.group.harness import run_ranks

pytestmark = [
    pytest.mark.timeout(400),  # the first to ask waits for all that its ranks do
    pytest.mark.skipif(
        find_spec("peft") is None or find_spec("torchao") is None,
        reason="peft and torchao are not installed (pip install -c constraints.txt '.[test]')",
    ),
]

RANKS = "tests.group.quantized_ranks:"
# Largest difference of a parameter after three steps that comes of the order of summation: 1.1e-16
# in float64, 3.4e-7 in float32, were seen.
FLOOR = {True: 2e-14, False: 2e-6}
SOME = ["ddp", "zero3", "pp=2"]
EVERY_TIME: list[tuple[str, tuple[Any, ...]]] = [
    ("parity", (SOME, "int8", True)),
    ("written", (["zero3"],)),
    ("with_tp", ()),
]


@cache
def _every_time() -> list[list[Any]]:
    return run_ranks(2, RANKS + "several", EVERY_TIME, timeout_s=380)


def given(name: str) -> list[Any]:
    """Return what each rank gave for a function of `EVERY_TIME`."""
    (place,) = (i for i, (called, _) in enumerate(EVERY_TIME) if called == name)
    return [of_rank[place] for of_rank in _every_time()]


def check(found: dict[str, Any], *, double: bool) -> None:
    for layout, of_layout in found.items():
        assert not isinstance(of_layout, str), f"{layout}: {of_layout}"
        off, verdict, explained = of_layout
        assert off <= FLOOR[double], layout
        assert verdict.startswith("equal"), (layout, verdict)
        assert "quantized parameters, kept whole" in explained, layout


def test_adapters_on_int8_weights_train_as_in_one_process() -> None:
    for of_rank in given("parity"):
        assert list(of_rank) == SOME
        check(of_rank, double=True)


def test_the_bytes_of_quantized_weights_are_counted_whole() -> None:
    first, _ = given("parity")
    # 18,432 numbers of one byte, 576 rows with a scale of 4 bytes and a zero point of one.
    assert "of these 21 kB are 18,432 quantized parameters" in first["zero3"][2]
    assert "of these 10 kB are 9,216 quantized parameters" in first["pp=2"][2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_every_layout_trains_adapters_on_every_kind_of_quantized_weights(kind: str) -> None:
    double = kind == "int8"
    two = ["ddp", "zero1", "zero2", "zero3", "pp=2", "cp=2"]
    for ranks, layouts in ((2, two), (4, ["hsdp", "fsdp=2 cp=2", "pp=2 fsdp=2", "dp=2 pp=2"])):
        for of_rank in run_ranks(ranks, RANKS + "parity", layouts, kind, double, timeout_s=380):
            check(of_rank, double=double)


def _check_written(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for layout, of_layout in of_rank.items():
            assert not isinstance(of_layout, str), f"{layout}: {of_layout}"
            assert of_layout["from a layout"] == of_layout["from a state"] == 0.0, layout
            assert "All keys matched" in of_layout["itself"], layout
            assert of_layout["merged"].startswith("CheckpointError: Adapters cannot be merged")
    for of_layout in found[0].values():
        assert of_layout["files"] == of_layout["plain"] == 0.0
        assert of_layout["merges"]


def test_what_is_saved_is_loaded_by_plain_peft_bit_for_bit_and_so_is_the_whole_state() -> None:
    _check_written(given("written"))


@pytest.mark.slow
def test_any_layout_writes_what_plain_peft_reads() -> None:
    _check_written(run_ranks(2, RANKS + "written", ["ddp", "zero1", "zero2", "pp=2"]))


def test_tp_refuses_quantized_weights_and_leaves_out_what_a_plan_leaves_out() -> None:
    for found in given("with_tp"):
        assert found["its plan"] <= FLOOR[True]
        assert "q_proj is a Int8Tensor, which tp cannot cut" in found["refused"]
        assert 'use "zero3", "ddp" or pp' in found["refused"]
