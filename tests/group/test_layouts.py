"""Layouts on real ranks: the same numbers as one process, and wrong use refused in words."""

from functools import cache
from typing import Any

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.layout_ranks:"
LAYOUTS = {2: ["ddp", "zero1", "zero2", "zero3"], 4: ["ddp", "zero1", "zero2", "zero3", "hsdp"]}
# Largest difference of a parameter after five AdamW steps that comes from the order of summation
# alone: AdamW amplifies round-off.
FLOOR = {"float32": 2e-5, "float64": 1e-12}


def cases() -> list[object]:
    made: list[object] = []
    for model, ranks in (("gpt", 2), ("gpt", 4), ("conv", 2), ("conv", 4)):
        for layout in LAYOUTS[ranks]:
            for dtype in FLOOR:
                # The longest. Two ranks tell it bit by bit, for which one dtype is as good as the
                # other, and four in float64; "hsdp" with convolutions is in test_parity's choice.
                is_fast = (ranks, dtype) in ((2, "float32"), (4, "float64"))
                is_slow = not is_fast or (model, ranks) == ("conv", 4)
                marks = (pytest.mark.slow,) if is_slow else ()
                made.append(pytest.param(model, ranks, layout, dtype, marks=marks))
    return made


@cache
def parity(model: str, ranks: int, dtype: str) -> list[dict[str, tuple[float, float]]]:
    return run_ranks(ranks, RANKS + "parity", model, LAYOUTS[ranks], dtype)


@pytest.mark.parametrize(("model", "ranks", "layout", "dtype"), cases())
def test_a_layout_trains_as_one_process_does_on_the_same_split(
    model: str, ranks: int, layout: str, dtype: str
) -> None:
    for found in parity(model, ranks, dtype):
        in_losses, in_state = found[layout]
        if ranks == 2:  # two summands have one order
            assert (in_losses, in_state) == (0, 0)
        assert in_losses <= FLOOR[dtype]
        assert in_state <= FLOOR[dtype]


@pytest.mark.parametrize(
    ("layout", "name", "axes"),
    [("dp=2", "ddp", ("dp",)), ("zero2", "zero2", ("fsdp",)), ("fsdp=2", "zero3", ("fsdp",))],
)
def test_a_model_keeps_its_names_and_says_its_layout(
    layout: str, name: str, axes: tuple[str, ...]
) -> None:
    for seen in run_ranks(2, RANKS + "looks_like_the_users_model", layout):
        claims = ("same names", "same class", "same object", "again")
        assert {claim: seen[claim] for claim in claims} == dict.fromkeys(claims, True)
        assert seen["facts"] == {
            "layout": name,
            "model": "ConvNet",
            "parameters": str(seen["count"]),
            "layout_explained": seen["explained"],
        }
        assert seen["axes"] == axes
        assert seen["repr"].startswith(f"<Layout {name} (")
        assert "\n" not in seen["repr"]
        assert "a rank sends" in seen["explained"]


def test_shards_halve_what_a_rank_holds_and_units_are_the_residual_blocks() -> None:
    for seen in run_ranks(2, RANKS + "looks_like_the_users_model", "zero3"):
        assert seen["held"] < 0.51 * seen["count"]
        assert seen["blocks"] == ("layer_1.0", "layer_1.1", "layer_2.0", "layer_2.1")
        assert "4 blocks (layer_1.0" in seen["explained"]


def test_zero1_shares_the_states_and_refuses_an_optimizer_that_does_not() -> None:
    first, second = run_ranks(2, RANKS + "shares_states")
    assert first["sum"] == second["sum"]
    assert first["moments"] + second["moments"] == first["numbers"]
    assert max(first["moments"], second["moments"]) < 0.75 * first["numbers"]
    for seen in (first, second):
        assert seen["moved"]
        assert len(seen["said"]) == 2  # at each step, and nothing was changed
        assert "This AdamW would keep all of its states" in seen["said"][0]
        assert "layout.optimizer(torch.optim.AdamW, lr=...)" in seen["said"][0]
        assert '"zero2"' in seen["said"][0]
        assert "1/2 of an optimizer's states" in seen["explained"]
        assert seen["kinds"] == ["ZeroRedundancyOptimizer", "AdamW"]


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_layout_lives_no_longer_than_its_model(layout: str) -> None:
    assert run_ranks(2, RANKS + "forgets_a_dropped_model", layout) == [0, 0]


def test_rank_0_may_evaluate_alone_under_ddp() -> None:
    seen, other = run_ranks(2, RANKS + "evaluates_alone")
    assert len(seen) == 2
    assert seen[0] != seen[1]
    assert other == []


@pytest.mark.parametrize(("layout", "model"), [("ddp", "lstm"), ("zero1", "conv"), ("cp=2", "gpt")])
def test_weights_are_averaged_in_a_plain_copy_of_the_model(layout: str, model: str) -> None:
    for seen in run_ranks(2, RANKS + "averages_weights", layout, model):
        assert [what for what, is_so in seen.items() if not is_so] == []


def test_a_copy_of_shards_is_refused_in_words() -> None:
    for told in run_ranks(2, RANKS + "refuses_copies", "zero3"):
        assert told.startswith('A model with the layout "zero3" cannot be copied')
        assert "layout.state_dict() on all ranks" in told


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_running_statistics_follow_rank_0_and_constants_stay_at_home(layout: str) -> None:
    (constant_0, *stats_0), (constant_1, *stats_1) = run_ranks(
        2, RANKS + "buffers_after_a_step", layout
    )
    assert stats_0 == stats_1
    assert (constant_0, constant_1) == (0, 1)


def test_buffers_of_every_dtype_and_size_follow_rank_0_bit_for_bit() -> None:
    for seen in run_ranks(2, RANKS + "buffers_of_every_kind"):
        assert len(seen) == 14
        assert all(seen.values()), seen


@pytest.mark.parametrize("through", ["layout", "model"])
def test_communication_hooks_work_under_ddp(through: str) -> None:
    (calls_0, grads_0), (calls_1, grads_1) = run_ranks(2, RANKS + "hooked", through)
    assert calls_0 == calls_1 >= 1
    assert grads_0 == grads_1


def test_gradients_can_be_gathered_without_synchronising() -> None:
    assert run_ranks(2, RANKS + "gathers_without_synchronising") == [True, True]


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    return run_ranks(2, RANKS + "refusals")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown word", ["zeor3", "zero3"]),
        ("product", ["needs 3 ranks", "there are 2", '"dp=-1" gives dp=2']),
        ("cp", ["The model takes images, of shape", "cp cuts sequences"]),
        ("policy", ["object is not a policy", "policies are", "TensorParallel", "Precision"]),
        ("no module", ["got a str", "torch.nn.Module"]),
        ("optimizer before fsdp", ["An optimizer (SGD) already holds", "make the optimizer after"]),
        ("another layout", ['has the layout "ddp"', "build the model again"]),
        ("a part", ["A part of this model, 0,"]),
        ("wrapped", ["DistributedDataParallel", "leave parallelize out"]),
        ("scalar", ["Parameter gain is a scalar"]),
        ("a list", ["A ModuleList has no forward"]),
        ("frozen", ["No parameter of the model requires a gradient"]),
        ("meta", ["meta device", "parallelize(lambda: Model(config)"]),
        ("shapes", ["Ranks 0 and 1", "weight is (2, 2)", "(3, 2)"]),
        ("layouts", ["layout is zero2", "zero3 on rank 1"]),
    ],
)
def test_wrong_use_is_refused_in_words_on_every_rank(
    refusals: list[dict[str, str]], case: str, words: list[str]
) -> None:
    for texts in refusals:
        assert [word for word in words if word not in texts[case]] == []


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_a_part_of_a_block_may_be_called_after_it(layout: str) -> None:
    for live, alone, hooks in run_ranks(2, RANKS + "parts_called_outside", layout):
        assert live == pytest.approx(alone, rel=1e-12)
        assert hooks == []


def test_a_part_of_a_block_that_is_called_before_it_is_refused_in_words() -> None:
    for told in run_ranks(2, RANKS + "part_called_before_its_block"):
        assert "blocks.0.0 is called before blocks.0, of which it is a part" in told
        assert 'parallelize(model, "zero1")' in told


def test_an_output_that_is_a_view_is_nothing_to_warn_of() -> None:
    assert run_ranks(2, RANKS + "warnings_of_a_step", "zero3") == [[], []]


def test_fsdp_has_no_communication_hooks(refusals: list[dict[str, Any]]) -> None:
    assert all("hook" not in texts for texts in refusals)


def test_an_optimizer_that_only_a_cycle_keeps_does_not_refuse_fsdp() -> None:
    assert run_ranks(2, RANKS + "trains_after_a_stale_optimizer") == ["zero3", "zero3"]


def test_this_torch_has_what_layouts_need() -> None:
    assert run_ranks(1, RANKS + "self_test") == [[]]


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero3"])
def test_a_quantized_weight_comes_from_rank_0_and_what_is_beside_it_is_trained(layout: str) -> None:
    first, second = run_ranks(2, RANKS + "quantized", layout)
    assert first[0] == second[0] < 0
    assert (first[1], second[1]) == (True, False)


def test_a_trained_quantized_weight_that_cannot_be_cut_is_refused_in_words() -> None:
    for told in run_ranks(2, RANKS + "quantized", "zero3", True):
        assert "Parameter weight is a Int8Tensor, which fsdp cannot cut into shards." in told
        assert 'use "ddp"' in told
