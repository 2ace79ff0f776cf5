"""Pipelines on real ranks: one process's numbers, and wrong use refused in words."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from nbdist.engine.layout.policies.efficiency import ActivationCheckpoint, Precision
from nbdist.engine.layout.policies.policies import ContextParallel, Pipeline, TensorParallel
from tests.group.harness import run_ranks

RANKS = "tests.group.pipeline_ranks:"


def by(schedule: str, *others: object) -> tuple[object, ...]:
    return (Pipeline(schedule, microbatches=4), *others)


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
AGAIN, EVERY_SECOND = ActivationCheckpoint(), ActivationCheckpoint(every=2)
SELECTIVE = ActivationCheckpoint(selective=True)
PURE = {
    "gpt": [("pp=2", by("1f1b", SELECTIVE)), ("pp=2", by("interleaved", AGAIN))],
    # Whose running statistics must follow a batch once, though blocks see it twice and three times.
    "conv": [("pp=2", by("zbv", AGAIN))],
}
PURE_TOO = {
    "gpt": [
        *(("pp=2", by(schedule)) for schedule in SCHEDULES),
        ("pp=2", by("zero-bubble", EVERY_SECOND)),
    ],
    "conv": [("pp=2", by("1f1b")), ("pp=2", by("gpipe", SELECTIVE))],
}


@cache
def pure(model: str, *, too: bool = False) -> list[list[dict[str, Any]]]:
    cases = (PURE_TOO if too else PURE)[model]
    return run_ranks(2, RANKS + "parity", model, [torch.float32], cases, None, timeout_s=120)


@pytest.mark.parametrize("too", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", PURE)
def test_a_pipeline_makes_one_process_s_numbers_bit_by_bit(model: str, *, too: bool) -> None:
    for case in zip(*pure(model, too=too), strict=True):
        _is_one_process_s(list(case))


def _is_one_process_s(ranks: list[dict[str, Any]]) -> None:
    assert [rank["state"] for rank in ranks] == [0, 0]
    assert [rank["losses"] for rank in ranks if rank["has loss"]] == [0]
    assert [rank["losses"] for rank in ranks if not rank["has loss"]] == [None]


@pytest.mark.parametrize("model", PURE)
def test_each_parameter_lies_on_one_rank_under_its_own_name(model: str) -> None:
    first, last = (found[0] for found in pure(model))
    assert sorted(first["names"] + last["names"]) == first["all"]
    assert set(first["names"]).isdisjoint(last["names"])


# Largest differences that come from the order of summation alone, of clipped AdamW steps.
FLOOR = {torch.float32: 2e-5, torch.float64: 1e-12}
SEQUENCE = TensorParallel(sequence=True, loss=True)
ULYSSES, GATHER = ContextParallel("ulysses"), ContextParallel("gather")
OWN = ContextParallel("gather", loss=True)

# (model, ranks, dtype, cases): what `make test` runs, and the rest of the matrix.
EVERY_TIME = [
    (
        "gpt",
        4,
        torch.float64,
        [
            *((f"pp=2 {axis}=2", by("1f1b")) for axis in ("fsdp", "tp")),
            ("pp=2 cp=2", by("interleaved", GATHER, AGAIN)),
        ],
    ),
    ("sharing", 2, torch.float64, [("pp=2", by("1f1b"))]),
]
SLOW = [
    (
        "gpt",
        4,
        dtype,
        [(f"pp=2 {axis}=2", by(s)) for axis in ("dp", "fsdp", "tp") for s in SCHEDULES],
    )
    for dtype in FLOOR
]
SLOW += [
    (
        "gpt",
        4,
        torch.float64,
        [
            *((f"pp=2 {axis}=2", by("1f1b", SELECTIVE)) for axis in ("dp", "fsdp", "tp")),
            *((f"pp=2 {axis}=2", by("zbv", AGAIN)) for axis in ("dp", "fsdp", "tp")),
            ("pp=2 tp=2", by("interleaved", AGAIN, SEQUENCE)),
        ],
    ),
    ("llama", 4, torch.float64, [("pp=2 fsdp=2", by("1f1b", AGAIN))]),
    (
        "tied",
        4,
        torch.float64,
        [
            *((f"pp=2 {axis}=2", by(s)) for axis in ("dp", "fsdp", "tp") for s in SCHEDULES),
            ("pp=4", by("1f1b")),
            ("pp=2 cp=2", by("interleaved", GATHER, AGAIN)),
        ],
    ),
    (
        "sharing",
        4,
        torch.float64,
        [("pp=2 dp=2", by("interleaved")), ("pp=2 fsdp=2", by("1f1b")), ("pp=4", by("gpipe"))],
    ),
    (
        "gpt",
        4,
        torch.float64,
        [("pp=2 cp=2", by(s, method)) for s in SCHEDULES for method in (ULYSSES, GATHER, OWN)],
    ),
    ("llama", 4, torch.float64, [("pp=2 cp=2", by("1f1b", m)) for m in (ULYSSES, GATHER)]),
    (
        "gpt",
        8,
        torch.float64,
        [
            ("pp=2 cp=2 tp=2", by("1f1b", ULYSSES)),
            ("pp=2 cp=2 tp=2", by("interleaved", GATHER, SEQUENCE)),
            ("pp=2 fsdp=2 cp=2", by("1f1b", GATHER)),
            ("pp=2 dp=2 cp=2", by("zbv", ULYSSES)),
        ],
    ),
    ("gpt", 4, torch.float64, [("pp=-1", by("1f1b")), ("pp=2 tp=2", (*by("zbv"), SEQUENCE))]),
    ("conv", 4, torch.float64, [("pp=2 dp=2", by("1f1b")), ("pp=2 fsdp=2", by("zbv"))]),
    ("llama", 2, torch.float64, [("pp=2", by("1f1b")), ("pp=2", by("gpipe"))]),
    ("llama", 4, torch.float64, [("pp=2 tp=2", by("1f1b")), ("pp=2 fsdp=2", by("1f1b"))]),
    (
        "gpt",
        8,
        torch.float64,
        [
            ("pp=2 fsdp=2 tp=2", by("1f1b")),
            ("pp=2 dp=2 tp=2", by("zbv")),
            ("pp=2 dp=2 fsdp=2", by("interleaved")),
            ("pp=4 fsdp=2", by("1f1b")),
        ],
    ),
]
MATRIX = [*EVERY_TIME, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "ranks", "dtype", "cases"), MATRIX)
def test_it_trains_and_clips_beside_other_axes_as_one_process_does(
    model: str, ranks: int, dtype: torch.dtype, cases: list[Any]
) -> None:
    max_norm = None if model == "conv" else 0.5
    for found in run_ranks(ranks, RANKS + "parity", model, [dtype], cases, max_norm, timeout_s=400):
        for case in found:
            worst = max(case["state"], case["norms"], case["losses"] or 0)
            assert worst <= FLOOR[dtype]
            assert (case["losses"] is not None) == case["has loss"]


BF16, FP16 = Precision("bf16"), Precision("fp16")
# (model, layout, policies), and in which dtype stages send.
LOW_ON_TWO = [
    (("gpt", "pp=2", by("1f1b", BF16)), "float32"),  # the residual stream, under autocast
    (("conv", "pp=2", by("zero-bubble", BF16)), "bfloat16"),
]
LOW_ON_FOUR = [
    (("gpt", "pp=2 dp=2", by("1f1b", FP16)), "float32"),
    (("gpt", "pp=2 fsdp=2", by("1f1b", BF16)), "bfloat16"),
]
LOW_SLOW = [
    (("gpt", f"pp=2 {axis}=2", by(schedule, low, *others)), sent)
    for axis in ("dp", "fsdp", "tp")
    for low, sent in ((BF16, "bfloat16"), (FP16, "float16"))
    for schedule, *others in (("gpipe",), ("interleaved", SELECTIVE), ("zbv", AGAIN))
]


@cache
def low_on_two() -> list[Any]:
    return run_ranks(2, RANKS + "low_on_two_ranks", [case for case, _ in LOW_ON_TWO], timeout_s=120)


@cache
def low_on_four() -> list[Any]:
    cases, layouts = [case for case, _ in LOW_ON_FOUR], ["pp=2 dp=2", "pp=2 fsdp=2"]
    return run_ranks(4, RANKS + "low_on_four_ranks", cases, layouts, timeout_s=120)


@cache
def low_in_all_ways() -> list[Any]:
    cases = [case for case, _ in LOW_SLOW]
    return [(found,) for found in run_ranks(4, RANKS + "low", cases, timeout_s=400)]


LOW = [
    *((low_on_two, case, sent) for case, (_, sent) in enumerate(LOW_ON_TWO)),
    *(
        pytest.param(low_on_four, case, sent, marks=pytest.mark.slow)
        for case, (_, sent) in enumerate(LOW_ON_FOUR)
    ),
    *(
        pytest.param(
            low_in_all_ways, case, sent if "fsdp" in way[1] else "float32", marks=pytest.mark.slow
        )
        for case, (way, sent) in enumerate(LOW_SLOW)
    ),
]


@pytest.mark.timeout(600)  # the first one waits for all
@pytest.mark.parametrize(("ranks", "case", "sent"), LOW)
def test_in_low_precision_it_trains_as_one_process_that_computes_so(
    ranks: Callable[[], list[Any]], case: int, sent: str
) -> None:
    for low, *_ in ranks():
        found = low[case]
        # Another order of summation moves a number to its neighbour in the low precision.
        assert max(found["state"], found["losses"]) <= found["floor"]
        # Under tp itself, too: ranks add up in it what one process adds up in float32.
        assert found["norms"] <= (1e-3 if found["cuts sums"] else 1e-4)
        assert found["floor"] > 1e-4
        assert found["sent"] == found["told"] == {f"torch.{sent}"}


@pytest.mark.slow
def test_gradients_of_a_pipeline_are_averaged_in_the_dtype_asked_for() -> None:
    for _, (of_dp, of_fsdp) in low_on_four():
        from_rounded, from_exact = of_dp
        assert from_rounded <= from_exact / 3  # the order of rounding and of dividing
        assert 0 < from_exact < 1e-2
        # fsdp adds micro-batches up in it, too.
        assert 0 < of_fsdp[1] < 1e-2


def test_an_overflow_in_one_stage_skips_the_step_in_all() -> None:
    (_, first), (_, last) = low_on_two()
    for rank in (first, last):
        scale, changed, its_next, its_change = rank["all trained"]
        assert (scale, changed, its_next) == (128, 0, 128)
        assert its_change > 0
    assert first["first stage frozen"] == [128, 0, 128, 0]
    assert last["first stage frozen"][:3] == [128, 0, 128]


@pytest.fixture(scope="module")
def used() -> list[dict[str, Any]]:
    return run_ranks(2, RANKS + "uses", timeout_s=120)


def test_without_gradients_a_step_evaluates_a_batch_of_any_size(used: list[dict[str, Any]]) -> None:
    assert used[0]["evaluated"] is None
    assert used[1]["evaluated"] <= 1e-14
    assert [rank["gradients after"] for rank in used] == [0, 0]


def test_a_step_in_parts_gathers_what_one_would(used: list[dict[str, Any]]) -> None:
    assert max(rank["accumulated"] for rank in used) <= 1e-14


def test_blocks_that_are_computed_anew_get_the_hidden_state_again() -> None:
    assert max(run_ranks(2, RANKS + "with_checkpoints")) <= 1e-14


def test_it_says_which_blocks_are_where_and_what_that_costs(used: list[dict[str, Any]]) -> None:
    for rank in used:
        assert rank["again"]
        assert [place for place, _ in rank["stages"]] == [0, 1]
        assert sum((blocks for _, blocks in rank["stages"]), ()) == (
            "blocks.0",
            "blocks.1",
            "blocks.2",
            "blocks.3",
        )
        # Two ranks send 32 numbers of 8 bytes for a token, one forward and one backward.
        assert "256 B over pp for each token" in rank["explained"]
        assert "1f1b, 4 micro-batches a step; a rank waits 20% of a step" in rank["explained"]
        assert "% of the time" in rank["explained"]
    assert used[0]["stages"] == used[1]["stages"]


def test_a_model_cut_into_stages_is_called_by_a_step_alone(used: list[dict[str, Any]]) -> None:
    for rank in used:
        assert "cannot be called by itself" in rank["called"]
        assert "layout.step(x, y, loss_fn)" in rank["called"]


def test_a_batch_that_cannot_be_cut_is_refused_with_what_works(used: list[dict[str, Any]]) -> None:
    for rank in used:
        assert "6 samples cannot be cut into 4 equal" in rank["uneven"]
        assert "give 4 or 8 samples, or Pipeline(microbatches=3)" in rank["uneven"]
        assert "leave a smaller last batch out, with drop_last=True" in rank["smaller last"]


def test_clipping_by_the_norm_of_one_stage_is_refused(used: list[dict[str, Any]]) -> None:
    for rank in used:
        for way in ("by torch", "by its home's name"):
            assert 'a model with the layout "pp=2"' in rank[way]
            assert "layout.clip_grad_norm_(max_norm)" in rank[way]
        assert rank["clipped"] == (True, 3.0)


def test_a_stage_that_is_frozen_has_an_optimizer_that_trains_nothing(
    used: list[dict[str, Any]],
) -> None:
    assert used[0]["frozen"] == (0, 0.0)
    count, moved = used[1]["frozen"]
    assert count > 0
    assert moved > 0


@pytest.mark.slow
def test_shares_of_different_size_count_by_their_samples() -> None:
    found = run_ranks(4, RANKS + "uneven_shares", ["pp=2 dp=2", "pp=2 fsdp=2"], timeout_s=120)
    assert max(max(of_rank) for of_rank in found) <= 1e-14


def test_stages_drop_differently_and_what_a_cell_draws_stays_alike() -> None:
    (*first, mine), (*second, theirs) = run_ranks(2, RANKS + "draws_of_dropout")
    assert len({*first, *second}) == 4
    assert mine == theirs


def test_blocks_that_are_computed_again_drop_the_same() -> None:
    for forward, again, _, kept in run_ranks(2, RANKS + "draws_again", "pp=2"):
        assert len(set(forward)) == len(forward) == 2
        assert sorted(again) == sorted(forward)
        assert "1 blocks keep their inputs alone, 12 kB of inputs in the last micro-batch" in kept


@pytest.mark.slow
def test_parts_of_sequences_drop_differently_in_all_stages() -> None:
    ranks = run_ranks(4, RANKS + "draws_again", "pp=2 cp=2")
    forwards = [number for forward, *_ in ranks for number in forward]
    assert len(set(forwards)) == len(forwards) == 8
    assert all(sorted(again) == sorted(forward) for forward, again, *_ in ranks)
    assert len({after for _, _, after, _ in ranks}) == 1
    # A rank has half of each sequence, and sends it: two ranks 32 numbers of 4 bytes, both ways.
    assert "6.1 kB of inputs in the last micro-batch" in ranks[2][3]
    assert "64 B over pp for each token" in ranks[2][3]


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    return run_ranks(2, RANKS + "refusals", timeout_s=120)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "shared in halves",
            ["norm_1.weight is in several modules of a stage", 'Pipeline("1f1b")'],
        ),
        ("kept aside", ["No stage can begin with blocks.1", "that blocks.0 makes and does not"]),
        ("few blocks", ['pp=2 by "interleaved" makes 4 stages of 2 blocks']),
        ("no blocks", ["Linear has no list of blocks"]),
        ("few micro-batches", ["1 micro-batches do not go through 2", "microbatches=2"]),
        ("rounds", ["5 micro-batches do not go", "Pipeline(microbatches=6) is the nearest"]),
        ("no block", ["'blocks.9', which is not a block", "blocks.0 ... blocks.3"]),
        ("wrong count", ["1 first blocks, and there are 2 stages", "['blocks.0', 'blocks.2']"]),
        ("wrong begin", ["must begin with the first block"]),
        ("schedule", ["'2f2b' is not a pipeline schedule", "1f1b, gpipe, interleaved"]),
        ("halves", ['selective=True) does not go with Pipeline("zero-bubble")', "two halves"]),
        ("split", ["'size' is not a known way to split"]),
        ("example", ["does not run with the example", "Pipeline(example=batch)"]),
        ("old optimizer", ["An optimizer (SGD) already holds", "pp replaces"]),
    ],
)
def test_wrong_use_is_refused_in_words_on_every_rank(
    refusals: list[dict[str, str]], case: str, words: list[str]
) -> None:
    for texts in refusals:
        assert [word for word in words if word not in texts[case]] == []


@pytest.mark.slow
def test_two_stages_a_rank_evaluate_as_one_process_does() -> None:
    first, last = run_ranks(2, RANKS + "evaluations", ["interleaved", "zbv"], timeout_s=120)
    assert first[:3] == last[3:] == [None] * 3
    assert max(last[:3] + first[3:]) <= 1e-14


@pytest.mark.slow
def test_nothing_of_a_batch_is_held_after_it() -> None:
    for held in run_ranks(2, RANKS + "held_of_a_batch", ["1f1b", "gpipe", "interleaved"]):
        assert held == [0] * 6
