"""Experts on real ranks: one process's numbers, whatever tokens choose; refusals in words."""

from functools import cache
from typing import Any

import pytest

from tests.group.harness import run_ranks

pytestmark = pytest.mark.timeout(300)  # the first to ask waits for all that its ranks do

RANKS = "tests.group.expert_ranks:"
# Largest difference of a loss or a parameter after three clipped steps in float64 that comes of the
# order of summation.
FLOOR = 1e-12
# Of S = 6 tokens a sample, K = 2 experts a token, E = 4 experts in each of two mixtures, D = 16.
TOKENS, CHOSEN, EXPERTS, MIXTURES, WIDTH, DOUBLE, WHOLE_NUMBER = 24, 2, 4, 2, 16, 8, 8

Case = tuple[str, str, str]  # model, layout, policy
TWO: list[Case] = [
    ("net", "ep=2", ""),
    ("keywords", "ep=2", ""),
    ("width of as many", "ep=2", ""),
    ("one-sided", "ep=2", "checkpoint"),
    ("frozen experts", "ep=2", ""),
    ("frozen router", "ep=2", ""),
]
FOUR: list[Case] = [
    ("net", "dp=2 ep=2", ""),
    ("at once", "ep=2 tp=2", ""),
    ("at once, one-sided", "ep=2 tp=2", "checkpoint"),
]
SLOW: list[Case] = [
    *(
        (model, layout, policy)
        for model in ("one-sided", "eight", "frozen experts", "frozen router")
        for layout in ("dp=2 ep=2", "fsdp=2 ep=2", "fsdp=2 ep=2 zero2", "ep=4")
        for policy in ("", "checkpoint")
    ),
    *(
        (f"at once{kind}", "ep=2 tp=2", policy)
        for kind in (", one-sided", ", frozen experts", ", frozen router")
        for policy in ("", "checkpoint", "experts whole")
    ),
]
EIGHT: list[Case] = [
    *(("eight", by, "") for by in ("dp=2 fsdp=2 ep=2", "ep=8", "fsdp=4 ep=2", "dp=2 ep=4")),
    *(("at once, one-sided", f"{by}=2 ep=2 tp=2", "") for by in ("dp", "fsdp")),
    ("at once, one-sided", "pp=2 ep=2 tp=2", "pipeline"),
]
CALLS: dict[int, list[tuple[str, tuple[Any, ...]]]] = {
    2: [
        ("parity", (TWO,)),
        ("looks_like_the_users_model", ()),
        ("whole_again", ("net", "ep=2")),
        ("unequal_shares", ()),
        ("in_two_backwards", ()),
        ("bytes_sent", ()),
        ("loads", ()),
        ("published", ("ep=2",)),
        ("proofs", ()),
        ("refusals", ()),
        ("called_in_another_way", ()),
    ],
    4: [
        ("parity", (FOUR,)),
        ("whole_again", ("at once", "ep=2 tp=2")),
        ("published", ("ep=2 tp=2",)),
        ("refusals_of_four", ()),
    ],
}


@cache
def _all_of(ranks: int) -> list[list[Any]]:
    return run_ranks(ranks, RANKS + "several", CALLS[ranks], timeout_s=280)


def given(ranks: int, name: str) -> list[Any]:
    """Return what each rank gave for a function of `CALLS`."""
    place = [called for called, _ in CALLS[ranks]].index(name)
    return [of_rank[place] for of_rank in _all_of(ranks)]


@cache
def slow_parity(ranks: int) -> list[Any]:
    return run_ranks(ranks, RANKS + "parity", SLOW if ranks == 4 else EIGHT, timeout_s=600)


def _check(case: Case, ranks_found: list[Any]) -> None:
    for found in ranks_found:
        in_losses, in_state = found[case]
        assert in_losses <= FLOOR
        assert in_state <= FLOOR


@pytest.mark.parametrize("case", TWO, ids=", ".join)
def test_two_ranks_train_as_one_process_does_on_the_same_split(case: Case) -> None:
    _check(case, given(2, "parity"))


@pytest.mark.parametrize("case", FOUR, ids=", ".join)
def test_beside_copies_and_shards_experts_train_as_in_one_process(case: Case) -> None:
    _check(case, given(4, "parity"))


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", SLOW, ids=", ".join)
def test_every_layout_of_four_trains_as_one_process_does(case: Case) -> None:
    _check(case, slow_parity(4))


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", EIGHT, ids=", ".join)
def test_every_layout_of_eight_trains_as_one_process_does(case: Case) -> None:
    _check(case, slow_parity(8))


@pytest.mark.slow
def test_blocks_may_be_compiled_afterwards() -> None:
    assert max(run_ranks(2, RANKS + "compiled_afterwards")) <= FLOOR


def test_a_model_keeps_its_names_and_a_rank_holds_half_of_the_experts() -> None:
    for seen in given(2, "looks_like_the_users_model"):
        claims = ("same names", "all DTensors", "tied", "again")
        assert {claim: seen[claim] for claim in claims} == dict.fromkeys(claims, True)
        assert set(seen["held"]) == {2}
        assert set(seen["counted"]) == {EXPERTS}  # beside its forward the module is the user's
        assert "ep: 2 of 4 experts a rank, 2 for a token" in seen["explained"]


def test_the_tokens_of_each_expert_are_told_and_are_all_that_there_were() -> None:
    texts = [seen["explained"] for seen in given(2, "looks_like_the_users_model")]
    lines = [line for text in texts for line in text.splitlines() if "tokens by expert" in line]
    assert len(lines) == 2 * MIXTURES
    counts = [int(n) for line in lines for n in line.partition("[")[2].rstrip("]").split(", ")]
    assert sum(counts) == 2 * TOKENS * CHOSEN * MIXTURES


def test_a_step_tells_of_forwards_that_train_each_once_and_what_an_even_share_is() -> None:
    even = TOKENS * CHOSEN * MIXTURES
    for rank, seen in enumerate(given(2, "loads")):
        share = 2 if rank == 0 else 0  # tokens go to the first rank's experts alone
        assert seen["step"] == {"expert_tokens": share * even, "expert_even": even}
        assert list(seen["experts"]) == [
            f"blocks.{block}.experts:{2 * rank + expert}" for block in (0, 1) for expert in (0, 1)
        ]
        assert sum(seen["experts"].values()) == share * even
        assert seen["again"] == ({"expert_tokens": 2 * share * even, "expert_even": 2 * even}, {})
        assert seen["evaluated"] == ({}, {})


@pytest.mark.parametrize("claim", ["trained", "shards", "back", "outputs"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_weights_go_out_into_shards_and_back(claim: str, ranks: int) -> None:
    assert all(seen[claim] for seen in given(ranks, "whole_again"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_published_of_experts_has_all_of_them_bit_for_bit(ranks: int) -> None:
    first, *others = given(ranks, "published")
    assert first == {"names": set(), "weights": True, "outputs": True, "trained": True}
    assert all(other == {"told": True} for other in others)


@pytest.mark.parametrize("how", ["unequal_shares", "in_two_backwards"])
def test_every_sample_counts_once(how: str) -> None:
    assert max(given(2, how)) < FLOOR


def test_bytes_of_exchanges_are_those_that_explain_tells() -> None:
    ranks = given(2, "bytes_sent")
    rows = TOKENS * CHOSEN * MIXTURES * (2 * WIDTH + 1) * DOUBLE  # there with a weight, and back
    counts = (EXPERTS + len(ranks)) * MIXTURES * WHOLE_NUMBER  # each also tells how many in all
    averaged = (ranks[0]["whole"] + ranks[0]["whole tensors"]) * DOUBLE
    # Rows that a rank sends to itself count here, and are half of them if tokens choose evenly.
    assert sum(seen["forward"] for seen in ranks) == 2 * (rows + counts)
    assert sum(seen["backward"] for seen in ranks) == 2 * (rows + averaged)
    assert ranks[0]["explained"] == pytest.approx((2 * rows + counts) / 2 + averaged, rel=1e-12)


@pytest.mark.parametrize("case", ["net", "dropout", "bf16"])
def test_a_proof_compares_with_one_process(case: str) -> None:
    ok, text = given(2, "proofs")[0][case]
    assert ok, text


def test_a_proof_tells_experts_whose_gradients_were_summed_and_not_averaged() -> None:
    ok, text = given(2, "proofs")[0]["sums"]
    assert not ok
    assert "experts" in text


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("none", ["Sequential has no experts that ep can share out", 'use "zero3"']),
        ("across tokens", ["blocks.0.experts compute something else", "in a forward"]),
        ("three", ["blocks.0.experts has 3 experts", "a divisor of 3: 3"]),
        ("no inputs", ["does not run with any input that was tried", "ExpertParallel(example="]),
        ("example", ["does not run with the example"]),
        ("made anew", ["made anew in each forward", "leave target_parameters out"]),
        ("compiled part", ["blocks.1 is compiled", "leave torch.compile out"]),
        ("compiled", ["The model is compiled"]),
        ("offload", ["Offload does not go with ep"]),
        ("reduce", ["ep does not average gradients in bf16"]),
        ("compress", ['the layout is "ep=2"']),
        ("zero1", ["zero1 goes with dp alone"]),
        ("no axis", ["the layout has no axis ep"]),
    ],
)
def test_what_cannot_be_shared_out_is_refused_in_words(case: str, words: list[str]) -> None:
    for texts in given(2, "refusals"):
        assert [word for word in words if word not in texts[case]] == []


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("cp", "ep does not go with cp"),
        ("pp", 'ep does not go with the schedule "zero-bubble"'),
        ("sequence", "TensorParallel(sequence=True) cannot route parts of a sequence to blocks.0"),
        ("sequence, whole experts", "TensorParallel(sequence=True) does not know blocks.0"),
    ],
)
def test_what_ep_does_not_go_with_is_refused_in_words(case: str, words: str) -> None:
    for texts in given(4, "refusals_of_four"):
        assert words in texts[case]


def test_a_call_that_was_not_tried_is_refused_on_the_rank_that_makes_it() -> None:
    for without_weights, unknown in given(2, "called_in_another_way"):
        assert "blocks.0.experts is called in another way than it was tried" in without_weights
        assert "A token is for expert 4, and there are 4, from 0 on" in unknown
