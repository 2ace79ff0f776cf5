"""PEFT's adapters under layouts: one process's numbers, nothing for the frozen, PEFT's files."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from tests.group.harness import run_ranks

pytestmark = [
    pytest.mark.timeout(400),  # the first to ask waits for all that its ranks do
    pytest.mark.skipif(
        find_spec("peft") is None,
        reason="peft is not installed (pip install -c constraints.txt '.[test]')",
    ),
]

RANKS = "tests.group.adapter_ranks:"
# Largest difference of a parameter in float64 after three steps of AdamW that comes from the order
# of summation: 1.9e-15 was seen, and 7e-13 where the bias of keys, whose gradient is rounding
# alone, is trained (a test of its own in test_tensor_parallel).
FLOOR = 2e-14
TWO = ["ddp", "zero1", "zero2", "zero3", "tp=2", "pp=2"]
SOME = ["ddp", "zero1", "zero3", "tp=2", "pp=2"]
FOUR = ["fsdp=2 tp=2", "dp=2 tp=2", "pp=2 tp=2", "hsdp"]
COLUMNS = {"use_dora": True, "target_modules": ["q_proj", "v_proj", "up_proj", "gate_proj"]}
SCALES = {
    "kind": "IA3",
    "target_modules": ["k_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}
SHARED = {"kind": "Vera", "target_modules": ["q_proj", "v_proj"]}  # two matrices for all layers
# What a layout refuses of a model, and the words: with or without adapters.
REFUSED = {
    ("gpt2", "tp"): "c_attn.base_layer is a Conv1D, which packs",
    ("gpt2", "pp"): "wte.weight is used by stages 0 and 1",
    ("bert", "pp"): "word_embeddings.weight is used by stages 0 and 1",
    ("t5", "tp"): "cannot run on a part of its heads",
    ("t5", "pp"): "does not run with any input that was tried",
}
EVERY_TIME: list[tuple[str, tuple[Any, ...]]] = [
    ("parity", ("llama", ["ddp", "zero3", "tp=2"], {})),
    ("parity", ("llama", ["tp=2"], COLUMNS)),
    ("parity", ("llama", ["tp=2"], SCALES)),
    ("parity", ("llama", ["pp=2"], SHARED)),
    ("without_peft_model", (["ddp", "zero3", "tp=2", "pp=2"],)),
    ("in_turns", ("llama", SOME, True)),
    ("proven_in_turns", ("llama", ["zero1", "tp=2"])),
    ("held_and_sent", ("llama", ["ddp", "zero1", "zero2", "zero3"], "Lora")),
    ("saved", ("llama", "tp=2")),
    ("mistakes", ()),
]


@cache
def _every_time() -> list[list[Any]]:
    return run_ranks(2, RANKS + "several", EVERY_TIME, timeout_s=380)


def given(name: str, options: dict[str, Any] | None = None) -> list[Any]:
    """Return what each rank gave for a function of `EVERY_TIME`."""
    (place,) = (
        i
        for i, (called, arguments) in enumerate(EVERY_TIME)
        if called == name and (options is None or arguments[-1] == options)
    )
    return [of_rank[place] for of_rank in _every_time()]


def check(name: str, layout: str, found: float | str) -> None:
    refused = [
        words for (model, axis), words in REFUSED.items() if model == name and axis in layout
    ]
    if refused:
        assert isinstance(found, str)
        assert found.startswith("LayoutError: ")
        assert refused[0] in found
    else:
        assert isinstance(found, float), found
        assert found <= FLOOR


@pytest.mark.parametrize(
    "options", [{}, COLUMNS, SCALES, SHARED], ids=["LoRA", "DoRA", "IA3", "VeRA"]
)
def test_an_adapter_trains_as_in_one_process(options: dict[str, Any]) -> None:
    for of_rank in given("parity", options):
        for layout, found in of_rank.items():
            check("llama", layout, found)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"target_modules": "all-linear"}], ids=["some", "all"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_every_layout_trains_adapters_of_every_model_or_refuses_it_in_words(
    name: str, options: dict[str, Any]
) -> None:
    for ranks, layouts in ((2, TWO), (4, FOUR)):
        for of_rank in run_ranks(ranks, RANKS + "parity", name, layouts, options, timeout_s=380):
            for layout, found in of_rank.items():
                check(name, layout, found)


@pytest.mark.slow
@pytest.mark.parametrize("options", [COLUMNS, SCALES], ids=["DoRA", "IA3"])
def test_every_layout_trains_dora_and_ia3(options: dict[str, Any]) -> None:
    for ranks, layouts in ((2, TWO), (4, FOUR)):
        for of_rank in run_ranks(ranks, RANKS + "parity", "llama", layouts, options, timeout_s=380):
            for layout, found in of_rank.items():
                check("llama", layout, found)


def _check_turns(found: dict[str, Any]) -> None:
    for layout, off in found.items():
        assert not isinstance(off, str), f"{layout}: {off}"
        in_state, in_logits = off
        assert in_state <= FLOOR, layout
        assert in_logits <= FLOOR, layout


def test_two_adapters_in_turns_train_as_in_one_process_and_can_be_disabled_between() -> None:
    for of_rank in given("in_turns"):
        assert list(of_rank) == SOME
        _check_turns(of_rank)


@pytest.mark.slow
def test_two_adapters_in_turns_with_an_optimizer_each_train_as_in_one_process() -> None:
    for ranks, layouts in ((2, TWO), (4, ["fsdp=2 tp=2", "hsdp"])):
        for of_rank in run_ranks(ranks, RANKS + "in_turns", "llama", layouts, False, timeout_s=380):
            _check_turns(of_rank)


def test_a_proof_and_a_copy_use_the_adapter_that_was_set() -> None:
    for of_rank in given("proven_in_turns"):
        for said in of_rank.values():
            assert all(text.startswith("equal") for text in said), said


def test_what_is_frozen_has_no_gradient_no_state_and_no_traffic_of_gradients() -> None:
    for of_rank in given("held_and_sent"):
        for layout, at in of_rank.items():
            trained = at["trained"]
            parts = 2 if layout == "zero1" else 1
            assert (at["gradients"], at["states"]) == (trained, trained / parts), layout
            # zero3 gathers the blocks again in a backward: as many bytes as a rank has of them.
            gathered = at["blocks"] if layout == "zero3" else 0
            assert at["backward"] == at["whole"] + gathered, layout
            assert at["step"] == (at["whole"] if layout == "zero1" else 0), layout


def _check_saved(found: list[dict[str, bool]]) -> None:
    first, *others = found
    assert first == dict.fromkeys(first, True)
    assert {"adapters", "merged", "files"} <= first.keys()
    assert all(other == {"its own save is refused": True} for other in others)


def test_plain_peft_loads_what_was_saved_bit_for_bit_merged_and_not() -> None:
    _check_saved(given("saved"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("llama", layout) for layout in ("ddp", "zero1", "zero3", "pp=2", "fsdp=2 tp=2")),
        *((name, "zero3") for name in ("gpt2", "bert", "t5")),
    ],
)
def test_plain_peft_loads_what_any_layout_saved(name: str, layout: str) -> None:
    ranks = 4 if layout == "fsdp=2 tp=2" else 2
    _check_saved(run_ranks(ranks, RANKS + "saved", name, layout))


def test_what_transformers_has_put_on_itself_trains_and_is_saved_alike() -> None:
    first, other = given("without_peft_model")
    for layout, found in first.items():
        assert isinstance(found, dict), f"{layout}: {found}"
        assert found["off"] <= FLOOR, layout
        assert found["loads"], layout
        for said in (found, other[layout]):
            assert "that got its adapters by add_adapter cannot be merged" in said["merged"]
            words = "are not averaged" if layout == "ddp" else "model.add_adapter cannot follow"
            assert said["later"].startswith("LayoutError: "), layout
            assert words in said["later"], layout


def test_mistakes_with_adapters_are_named() -> None:
    words = {
        "added, ddp": "lora_A.new.weight",
        "added, zero3": "add all adapters (add_adapter, load_adapter), then parallelize",
        "added, tp": 'model.add_adapter cannot follow the layout "tp=2"',
        "wrapped later, zero3": "q_proj.lora_B.default.weight",
        "own save, zero3": "layout.save_pretrained(folder) on all ranks",
        "own save, pp": "layout.save_pretrained(folder) on all ranks",
        "unload, tp": "layout.save_pretrained(folder, merged=True)",
        "merge, pp": "a rank has the layers of its stages only",
        "frozen, zero3": "no parameter of the model requires a gradient",
        "frozen, ddp": "No parameter of the model requires a gradient",
        "frozen, tp": "No parameter of the model requires a gradient",
        "merged, zero3": "unmerge_adapter",
        "merged, ddp": "unmerge_adapter",
        "DoRA on a row": "put no adapter on o_proj that computes over all of its inputs",
        "a plan for the base": "lora_B(lora_A(dropout(x)))",
        "gradients of parts": "DIFFERS: the gradient of base_model.model",
    }
    for of_rank in given("mistakes"):
        assert of_rank.keys() == words.keys()
        for label, text in words.items():
            said = of_rank[label]
            assert isinstance(said, str), f"{label}: nothing was said"
            assert text in said, label
            assert said.startswith("LayoutError: ") or label == "gradients of parts"
