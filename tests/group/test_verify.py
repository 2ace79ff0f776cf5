"""A layout proven against one process: right programs pass, planted bugs are named, all is left."""

import re
from typing import Any

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.verify_ranks:"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, RANKS + "on_two_ranks", timeout_s=300)


def test_right_programs_are_proven(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert [repr(proof) for proof in found["right"].values() if not proof.ok] == []


def test_two_ranks_that_share_a_batch_are_equal_bit_for_bit(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        equal = {case for case, proof in found["right"].items() if proof.is_bit_equal}
        assert equal >= {"small zero2", "conv zero3", "dropping zero3", "small ddp"}
        # The one process computes in the layout's precision.
        assert equal >= {"conv ddp", "untied zero3", "untied pp=2", "untied ddp"}


def test_a_proof_says_in_which_precision_it_was_made(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert "over 3 steps, in fp16" in found["right"]["untied tp=2"].verdict
        assert found["right"]["untied zero3"].verdict.endswith(
            "over 3 steps, in bf16, gradients averaged in bf16"
        )


@pytest.mark.parametrize("method", ["bf16", "powersgd"])
def test_compression_is_off_in_a_proof_and_what_it_changes_is_said(
    two_ranks: list[dict[str, Any]], method: str
) -> None:
    for found in two_ranks:
        proof, is_hook_left = found["compressed"][method]
        assert proof.is_bit_equal
        said = re.search(
            r"without compression, which changes gradients by (.+) % here", repr(proof)
        )
        assert said is not None, repr(proof)
        # bf16 has 8 bits, so a number is off by 0.4 % at most; rank 4 of 32 loses much more.
        low, high = {"bf16": (0.01, 0.4), "powersgd": (5, 100)}[method]
        assert low < float(said[1]) < high
        assert is_hook_left


def test_a_loss_that_is_none_on_one_rank_or_on_all_is_one_error_on_all(
    two_ranks: list[dict[str, Any]],
) -> None:
    expected = {
        "raises": "On rank 1 loss_fn fails: ValueError: no such class.",
        "vector": "On rank 1 loss_fn returns a tensor of shape (",
        "nothing": "On rank 1 loss_fn returns a NoneType, where a tensor of one number is needed.",
        "number": "loss_fn returns a float, where a tensor of one number is needed.",
        "vector on all": "loss_fn returns a tensor of shape (",
        "infinite": "In one process a loss is not finite",
        "right": "equal bit for bit over 1 step",
    }
    for found in two_ranks:
        said = {label: text[: len(expected[label])] for label, text in found["alone"].items()}
        assert said == expected


def test_parts_of_other_sizes_are_weighed_as_the_step_does(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert [found["unequal"].ok for found in two_ranks] == [True, True]


@pytest.mark.parametrize("way", ["ddp", "ddp, unequal", "ddp, accumulate", "pp=2"])
def test_a_masked_mean_is_another_loss_in_one_piece_and_the_advised_one_is_not(
    two_ranks: list[dict[str, Any]], way: str
) -> None:
    for found in two_ranks:
        plain, advised, off = found["masked"][way]
        said = "; in one piece the batch has another loss, "
        pieces = r", in 3 micro-batches" if way == "pp=2" else ""
        assert re.search(f"equal .+ over 3 steps{pieces}{said}", plain), plain
        assert "give layout.step what it keeps: weight=(y != -100)" in " ".join(plain.split())
        assert said not in advised
        assert off <= 1e-15


@pytest.mark.parametrize(
    "way",
    [
        *("ddp", "ddp, unequal", "ddp, none on rank 1", "zero3, unequal", "zero3, none on rank 1"),
        *("zero1", "pp=2", "pp=2, a part without", "cp=2"),
    ],
)
def test_a_masked_mean_weighted_by_its_kept_tokens_is_that_of_one_process(
    two_ranks: list[dict[str, Any]], way: str
) -> None:
    for found in two_ranks:
        of_loss, of_gradients = found["weighted"][way]
        assert of_loss <= 1e-15
        assert of_gradients <= 1e-15


def test_shares_that_do_not_go_into_one_piece_are_said_not_to_be_compared_so(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        assert "; not compared with the batch in one piece" in found["ragged"]


def test_right_programs_have_the_same_loss_in_one_piece(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert [repr(p) for p in found["right"].values() if p.one_piece is not None] == []


@pytest.mark.parametrize(
    ("bug", "what", "name", "step", "ranks"),
    [
        ("one gradient", "gradient", "blocks.1.up.weight", 1, (0, 1)),
        ("one millionth, float64", "gradient", "blocks.1.mlp.up.weight", 1, (0, 1)),
        ("one gradient, shards", "gradient", "blocks.1.up.weight", 1, (0, 1)),
        ("on rank 1", "gradient", "blocks.2.down.bias", 1, (0, 1)),
        ("from step 2", "gradient", "blocks.0.out.weight", 2, (0, 1)),
        ("weights", "weight", "norm.weight", 0, (1,)),
        ("dropout", "dropout", "blocks.1.mlp.drop", 0, (1,)),
        # All are wrong there; which is named first is a matter of floors.
        ("statistics", "buffer", r"layer_[12]\.[01]\.norm_[12]\.running_(mean|var)", 1, (1,)),
        ("not averaged", "gradient", "blocks.0.up.bias", 1, (0, 1)),
        ("not averaged, bf16", "gradient", "blocks.0.up.bias", 1, (0, 1)),
    ],
)
def test_a_planted_bug_is_named_with_its_tensor_and_step(
    two_ranks: list[dict[str, Any]], bug: str, what: str, name: str, step: int, ranks: tuple[int]
) -> None:
    for found in two_ranks:
        proof = found["planted"][bug]
        first = proof.first
        assert first is not None, "not found"
        assert re.fullmatch(name, first.name)
        assert (first.what, first.step, proof.ranks) == (what, step, ranks)
        assert "DIFFERS: " in repr(proof).splitlines()[0]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("averaged", ["'ok': True", "layout.step has not run yet", "float32 (16, 4)"]),
        ("not averaged", ["DIFFERS: the gradient of 0.weight at step 1"]),
        (
            "two ways, ddp",
            ["do not use second.weight and 1 more", "layout.verify((x, y), loss_fn)"],
        ),
        ("two ways, zero2", ["not use second.weight and 1 more", "layout.verify((x, y), loss_fn)"]),
        ("does not run", ["No batch is known", "layout.verify((x, y), loss_fn)"]),
    ],
)
def test_after_a_plain_loop_a_proof_tells_what_it_was_made_with_or_asks_for_a_batch(
    two_ranks: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    for found in two_ranks:
        assert [word for word in words if word not in found["asked"][case]] == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_does_not_hide_a_product_that_counts_twice(
    two_ranks: list[dict[str, Any]], precision: str
) -> None:
    for found in two_ranks:
        proof = found["planted"][f"twice, {precision}"]
        assert proof.first is not None, "not found"
        assert (proof.first.step, proof.first.what) == (1, "gradient")
        assert any(d.name == "blocks.1.up.weight" for d in proof.worst if not d.is_allowed)


@pytest.mark.parametrize("layout", ["", ", shards", ", tp"])
def test_a_rank_that_alone_detaches_its_loss_is_named_and_nobody_waits(
    two_ranks: list[dict[str, Any]], layout: str
) -> None:
    for found in two_ranks:
        proof = found["planted"]["detached" + layout]
        assert proof.first is not None, "not found"
        assert (proof.first.what, proof.first.step, proof.ranks) == ("gradient", 1, (1,))
        assert "Rank 1 has no gradient for position.weight and " in repr(proof)
        assert not any(d.name.startswith("norm.") and not d.is_allowed for d in proof.worst)


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.slow), "chaotic"])
def test_a_model_in_which_round_off_grows_is_proven_over_fewer_steps(name: str) -> None:
    proofs = run_ranks(2, RANKS + "drifting", name, "ddp", timeout_s=200)
    assert [repr(proof) for proof in proofs if not proof.ok] == []
    assert 1 <= proofs[0].steps <= 5
    assert proofs[0].steps == 5 or "Round-off grows fast in this model" in repr(proofs[0])
    proofs = run_ranks(2, RANKS + "drifting", name, "ddp", 1.01, timeout_s=200)
    assert [proof.first.step for proof in proofs if proof.first is not None] == [1, 1]


@pytest.mark.parametrize("bug", ["block", "plan"])
def test_a_block_that_computes_something_else_differs_at_the_first_step(
    two_ranks: list[dict[str, Any]], bug: str
) -> None:
    for found in two_ranks:
        first = found["planted"][bug].first
        assert first is not None, "not found"
        assert first.step == 1


@pytest.mark.parametrize("case", [("ddp", "small"), ("zero3", "conv")])
def test_training_goes_on_as_if_nothing_had_been_proven(
    two_ranks: list[dict[str, Any]], case: tuple[str, str]
) -> None:
    for found in two_ranks:
        assert found["kept"][case] == dict.fromkeys(found["kept"][case], True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "conv"])
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_training_goes_on_as_if_nothing_had_been_proven_under_every_layout(
    layout: str, name: str
) -> None:
    for kept in run_ranks(2, RANKS + "is_left_as_it_was", layout, name):
        assert kept == dict.fromkeys(kept, True)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("counting", ["does not compute the same twice", "a counter in Python"]),
        ("no skeleton", ["no plain model to compare", "cannot be copied"]),
        ("one tensor", ["got a Tensor where (x, y) should be"]),
        ("no step", ["verify(steps=0) makes no step"]),
        ("wrong loss", ["does not run in one process", "AttributeError", "loss_fn(model(x), y)"]),
        ("few", ["A share of 3 samples is too few for a pipeline of 2 ranks"]),
        ("sync", ["layer_1.0.norm_1 is a SyncBatchNorm"]),
        ("samples", ["Ranks 0 and 1 have different samples", '"tp=2"', "nbdist.loader"]),
    ],
)
def test_what_cannot_be_proven_is_refused_in_words_on_every_rank(
    two_ranks: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    for found in two_ranks:
        assert [word for word in words if word not in found["refused"][case]] == []


@pytest.mark.slow
@pytest.mark.parametrize("model", ["small", "conv", "untied", "dropping", "llama"])
def test_right_programs_on_four_ranks_are_proven(model: str) -> None:
    import torch

    layouts = ["ddp", "zero2", "zero3", "dp=2 fsdp=2"]
    if model in ("untied", "dropping", "llama"):
        layouts += ["fsdp=2 tp=2", "dp=2 tp=2"]
    if model in ("untied", "llama", "conv"):
        layouts += ["pp=2 fsdp=2", "pp=2 dp=2"]
    if model == "untied":
        layouts += ["zero1", "pp=2 tp=2"]
    dtypes = [torch.float32, torch.float64]
    cases = [(model, layout, dtype) for layout in layouts for dtype in dtypes]
    for proofs in run_ranks(4, RANKS + "right_programs", cases, timeout_s=600):
        assert [repr(proof) for proof in proofs if not proof.ok] == []
