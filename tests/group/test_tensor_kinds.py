"""Tensor parallel of packed, counted, crossed and stacked weights: the numbers of one process."""

from functools import cache
from typing import Any

import pytest

from nbdist.engine.layout.policies.policies import TensorParallel
from tests.group.harness import run_ranks
from tests.group.test_tensor_parallel import BOTH, FLOOR, LOSS, PLAIN, RANKS

pytestmark = pytest.mark.timeout(300)  # the first to ask waits for all that its ranks do

# (model, ranks, layout, policy); trained by AdamW for three steps, as test_tensor_parallel does.
CASES = [
    ("packed heads", 2, "tp=2", BOTH),
    ("interleaved", 2, "tp=2", PLAIN),
    ("related", 2, "tp=2", PLAIN),
    ("crossed", 2, "tp=2", PLAIN),
    ("one key", 2, "tp=2", BOTH),
    ("chain", 2, "tp=2", PLAIN),
    ("mixtral", 2, "tp=2", PLAIN),
    ("phi3", 2, "tp=2", LOSS),
]
SLOW = [
    ("packed heads", 2, "tp=2", PLAIN),
    ("packed, few keys", 2, "tp=2", PLAIN),
    ("scaled", 2, "tp=2", PLAIN),
    ("one key", 2, "tp=2", PLAIN),
    ("llama, one key", 2, "tp=2", PLAIN),
    ("gpt2", 2, "tp=2", PLAIN),
    ("packed heads", 4, "tp=4", PLAIN),
    ("packed heads", 4, "fsdp=2 tp=2", PLAIN),
    ("related", 4, "dp=2 tp=2", PLAIN),
    ("llama, one key", 4, "tp=4", PLAIN),
    ("llama, one key", 4, "fsdp=2 tp=2", PLAIN),
    ("chain", 4, "fsdp=2 tp=2", PLAIN),
    ("mixtral", 4, "fsdp=2 tp=2", PLAIN),
]
EXPLAINED = [
    "packed heads",
    "interleaved",
    "related",
    "scaled",
    "crossed",
    "one key",
    "llama, one key",
    "chain",
    *("gpt2", "mixtral", "phi3"),
]
Case = tuple[str, int, str, TensorParallel]


def _dtype(model: str) -> str:
    return "float32" if model == "mixtral" else "float64"  # torch multiplies groups of no other


@cache
def _all_of(ranks: int, *, is_slow: bool) -> list[list[Any]]:
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("parity", (model, [(layout, policy)], [_dtype(model)]))
        for model, n, layout, policy in (SLOW if is_slow else CASES)
        if n == ranks
    ]
    if not is_slow:
        calls += [("explained_of", (EXPLAINED,)), ("refusals_of_kinds", ())]
    elif ranks == 4:
        calls += [("chain_over_stages", ())]
    return run_ranks(ranks, RANKS + "several", calls, timeout_s=280)


def _id(case: Case) -> str:
    model, _, layout, policy = case
    words = [word for word in ("sequence", "loss") if getattr(policy, word)]
    return ", ".join([model, layout, *words])


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=map(_id, CASES + SLOW),
)
def test_a_kind_trains_as_one_process_does_on_the_same_split(case: Case) -> None:
    model, ranks, layout, policy = case
    is_slow = case in SLOW
    place = [one for one in (SLOW if is_slow else CASES) if one[1] == ranks].index(case)
    dtype = _dtype(model)
    for of_rank in _all_of(ranks, is_slow=is_slow):
        in_losses, in_state = of_rank[place][layout, str(policy), dtype]
        assert in_losses <= FLOOR[dtype]
        assert in_state <= FLOOR[dtype]


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        (
            "packed heads",
            [
                "for each token of its batch and 25 kB a step",  # 4 (2,048 + 4,096 + 128)
                "blocks.*.attn.qkv     packed: feeds a row (2 times)",
                "blocks.*.mlp.gate_up  packed: feeds a row (2 times)",
                "blocks.*.attn.heads   2 of 4 in forwards (2 times)",
                "blocks.*.attn.width   16 of 32 in forwards (2 times)",
            ],
        ),
        ("interleaved", ["blocks.*.attn.qkv    column: feeds a row (2 times)"]),
        ("crossed", ["blocks.*.attn.q    column: shares its input with 2 more (2 times)"]),
        ("related", ["blocks.*.attn.near       heads: has a number for each head (2 times)"]),
        ("scaled", ["blocks.*.attn.of_query  summed: sees a part of the heads or features (2 ti"]),
        (
            "one key",
            [
                "blocks.*.attn.k     copied: whole on each rank, for its heads or features",
                "blocks.*.attn.norm  summed: sees a part of the features (2 times)",
            ],
        ),
        ("llama, one key", ["self_attn.num_key_value_groups  2 of 4 in forwards (2 times)"]),
        (
            "chain",
            [
                "net.*     column: feeds a row",
                "net.*     summed: sees a part of the features",
                "of_token  column: shares its input with 1 more",
                "narrow    column: feeds a row",
            ],
        ),
        ("gpt2", ["transformer.h.*.attn.c_attn      packed: feeds a row (2 times)"]),
        ("mixtral", ["model.layers.*.mlp.experts", "experts: by its tp_plan (2 times)"]),
        ("phi3", ["gather: by its tp_plan", "split: by its tp_plan", "head: by its tp_plan"]),
    ],
)
def test_how_a_kind_is_cut_is_explained(model: str, lines: list[str]) -> None:
    for of_rank in _all_of(2, is_slow=False):
        assert [line for line in lines if line not in of_rank[-2][model]] == []


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mixing", ["With these cuts", "would get a wrong gradient", "of what a rank has whole"]),
        ("adapted experts", ["0.mlp.experts has an adapter", "target_modules", '"zero3"']),
        ("conv1d", ['c_fc is a Conv1D and cannot be cut as "head"']),
        ("experts", ["does not say of model.layers.0.mlp.experts that it holds experts"]),
        ("experts alone", ["not say of model.layers.0.mlp.experts how its parameters are cut"]),
        ("experts, sequence", ["cannot route parts of a sequence to model.layers.0.mlp.experts"]),
        ("packed without a row", ["What head packs is not known", "of which a forward shows none"]),
        ("theirs", ['"mla_kv_a_proj", which the plan for tp says of model.norm']),
    ],
)
def test_a_kind_that_cannot_be_cut_so_is_refused_in_words(case: str, words: list[str]) -> None:
    for of_rank in _all_of(2, is_slow=False):
        assert [word for word in words if word not in of_rank[-1][case]] == []


@pytest.mark.slow
def test_a_pair_lies_on_one_stage_or_is_refused_in_words() -> None:
    for of_rank in _all_of(4, is_slow=True):
        together, apart = of_rank[-1]
        assert together == "right"
        assert "pp cuts the model between 0 and 2, which tp cuts together" in apart
        assert 'Pipeline(split=["0", "4"])' in apart
