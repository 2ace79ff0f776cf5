"""Experts of a list on real ranks: one process's numbers, however they are called; refusals."""

from functools import cache
from typing import Any

import pytest

from tests.group.harness import run_ranks

pytestmark = pytest.mark.timeout(300)  # the first to ask waits for all that its ranks do

RANKS = "tests.group.listed_ranks:"
# Largest difference of a loss or a parameter after three clipped steps in float64 that comes of the
# order of summation.
FLOOR = 1e-12
# Of S = 6 tokens a sample, all E = 4 experts in each of two mixtures, D = 16, N = 2 ranks.
TOKENS, EXPERTS, MIXTURES, WIDTH, NUMBER, WORLD = 24, 4, 2, 16, 8, 2

Case = tuple[str, str, str]  # model, layout, policy
TWO: list[Case] = [
    ("loop", "ep=2", ""),
    ("again", "ep=2", ""),
    ("one-sided", "ep=2", ""),
    ("one-sided", "ep=2", "checkpoint"),
    ("empty calls", "ep=2", ""),
    ("frozen experts", "ep=2", ""),
    ("frozen router", "ep=2", ""),
]
FOUR: list[Case] = [
    ("one-sided", "dp=2 ep=2", ""),
    ("alone", "fsdp=2 ep=2", ""),
    ("dense", "pp=2 ep=2", "pipeline"),
]
SLOW: list[Case] = [
    *(
        (model, layout, policy)
        for model in ("loop", "again", "one-sided", "dense", "frozen parts")
        for layout in ("dp=2 ep=2", "fsdp=2 ep=2", "fsdp=2 ep=2 zero2", "ep=4")
        for policy in ("", "checkpoint")
    ),
    ("stacked", "pp=2 ep=2", "pipeline"),
]
CALLS: dict[int, list[tuple[str, tuple[Any, ...]]]] = {
    2: [
        ("parity", (TWO,)),
        ("looks_like_the_users_model", ()),
        ("unequal_shares", (5,)),
        ("unequal_shares", (8,)),
        ("bytes_sent", ()),
        ("proofs", ()),
        ("refusals", ()),
    ],
    4: [("parity", (FOUR,))],
}


@cache
def _all_of(ranks: int) -> list[list[Any]]:
    return run_ranks(ranks, RANKS + "several", CALLS[ranks], timeout_s=280)


def given(ranks: int, name: str, *arguments: Any) -> list[Any]:
    """Return what each rank gave for a function of `CALLS`."""
    place = next(
        i for i, (called, by) in enumerate(CALLS[ranks]) if called == name and arguments in ((), by)
    )
    return [of_rank[place] for of_rank in _all_of(ranks)]


@cache
def slow_parity() -> list[Any]:
    return run_ranks(4, RANKS + "parity", SLOW, timeout_s=600)


def _check(case: Case, ranks_found: list[Any]) -> None:
    for found in ranks_found:
        in_losses, in_state = found[case]
        assert in_losses <= FLOOR
        assert in_state <= FLOOR


@pytest.mark.parametrize("case", TWO, ids=", ".join)
def test_two_ranks_train_as_one_process_does_on_the_same_split(case: Case) -> None:
    _check(case, given(2, "parity"))


@pytest.mark.parametrize("case", FOUR, ids=", ".join)
def test_beside_copies_shards_and_stages_experts_train_as_in_one_process(case: Case) -> None:
    _check(case, given(4, "parity"))


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", SLOW, ids=", ".join)
def test_every_layout_of_four_trains_as_one_process_does(case: Case) -> None:
    _check(case, slow_parity())


@pytest.mark.slow
def test_blocks_may_be_compiled_afterwards() -> None:
    assert max(run_ranks(2, RANKS + "compiled_afterwards")) <= FLOOR


def test_a_model_keeps_its_names_and_a_rank_holds_half_of_the_experts() -> None:
    for seen in given(2, "looks_like_the_users_model"):
        claims = ("names", "again", "outputs", "frozen", "back")
        assert {claim: seen[claim] for claim in claims} == dict.fromkeys(claims, True)
        uncut = MIXTURES * EXPERTS  # a parameter of one number each, which all ranks have
        assert seen["held"] == (seen["whole"] - uncut) / WORLD + uncut
        assert "ep: 2 of 4 experts a rank, 2 for a token" in seen["explained"]
        assert "blocks.0.moe.experts: tokens by expert in the last" in seen["explained"]
        assert "their forwards' lines run twice" in seen["explained"]


@pytest.mark.parametrize("of_first", [5, 8])
def test_every_sample_counts_once_also_where_a_rank_has_none(of_first: int) -> None:
    assert max(given(2, "unequal_shares", of_first)) < FLOOR


def test_bytes_of_exchanges_are_those_that_explain_tells() -> None:
    for seen in given(2, "bytes_sent"):
        rows = 2 * TOKENS * EXPERTS * MIXTURES * WIDTH * NUMBER  # there and back
        counts = (EXPERTS + 2 * WORLD) * MIXTURES * NUMBER
        parts = seen["parts"] * NUMBER
        gradients = (seen["parts"] + seen["part tensors"]) * NUMBER
        averaged = seen["whole"] * NUMBER
        buffers = MIXTURES * NUMBER
        assert seen["forward"] == rows + counts + parts + buffers
        assert seen["backward"] == rows + gradients + averaged
        # Of what each rank sends to all, half goes to itself.
        to_others = (2 * rows + counts + parts + gradients) / WORLD
        assert seen["explained"] == pytest.approx(to_others + averaged, rel=1e-12)


@pytest.mark.parametrize("case", ["loop", "noise", "bf16", "draws", "kept"])
def test_a_proof_compares_with_one_process_and_a_forward_leaves_the_traces_of_one(
    case: str,
) -> None:
    ok, text = given(2, "proofs")[0][case]
    assert ok, text


def test_a_proof_tells_experts_whose_gradients_were_summed_and_not_averaged() -> None:
    ok, text = given(2, "proofs")[0]["sums"]
    assert not ok
    assert "experts" in text


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("chained", ["Net has no experts", "blocks.0.moe.experts is no list of experts"]),
        ("buffers", ["blocks.0.moe.experts has a buffer, 0.norm.running_mean (16,)"]),
        ("shared", ["blocks.0.moe.experts shares a parameter, 0.up.weight"]),
        ("across rows", ["blocks.0.moe.experts makes something else of a row among others"]),
        ("reading", ["blocks.0.moe.experts fails where its weights are not here"]),
        ("penalty", ["fails where its weights are not here", "reads the parameters of experts"]),
        ("three", ["blocks.0.moe.experts has 3, of which 2 ranks cannot have as many each"]),
        ("one bias", ["blocks.0.experts.shared (16,) is of all experts"]),
        ("jittering", ["The forward of blocks.0.moe.experts changes in place", 'use "zero3"']),
        ("turning", ["The forward of blocks.0.moe.experts asks", 'use "zero3"']),
    ],
)
def test_what_cannot_be_shared_out_is_refused_in_words(case: str, words: list[str]) -> None:
    for texts in given(2, "refusals"):
        assert [word for word in words if word not in texts[case]] == []
