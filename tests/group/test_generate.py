"""Text out of a spread model: the tokens of one process, and nothing else is changed."""

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

RANKS = "tests.group.generate_ranks:"
WAYS = ["greedy", "sampled", "beams", "padded", "no cache"]
TWO = ["ddp", "zero1", "zero2", "zero3", "tp=2", "pp=2"]
FOUR = ["fsdp=2 tp=2", "dp=2 tp=2", "pp=2 tp=2", "pp=2 fsdp=2", "hsdp"]
MODELS = ["llama", "lora", "sliding", "gpt2", "t5", "gpt"]
# What a layout refuses of a model, without any text.
IMPOSSIBLE = {("gpt2", "tp"), ("t5", "tp"), ("t5", "pp")}
EVERY_TIME: list[tuple[str, tuple[Any, ...]]] = [
    ("equal", ("llama", "zero3")),
    ("equal", ("gpt", "pp=2")),
    ("unequal_lengths", ("gpt",)),
    ("training_goes_on", ("gpt", "pp=2")),
    ("shown", ("gpt", "tp=2")),
    ("on_one_rank", ()),
    ("refusals", ()),
]


@cache
def _every_time() -> list[list[Any]]:
    return run_ranks(2, RANKS + "several", EVERY_TIME, timeout_s=380)


def given(name: str, *arguments: Any) -> list[Any]:
    """Return what each rank gave for a function of `EVERY_TIME`."""
    place = EVERY_TIME.index((name, arguments))
    return [of_rank[place] for of_rank in _every_time()]


def check(model: str, found: dict[str, tuple[bool, int]]) -> None:
    assert list(found) == (WAYS[:2] if model == "gpt" else WAYS)
    for way, (is_equal, tokens) in found.items():
        assert is_equal, way
        assert tokens > 1, way  # no text of one word, which anything makes


@pytest.mark.parametrize(
    ("model", "layout"),
    [arguments for name, arguments in EVERY_TIME if name == "equal"],
    ids=" ".join,
)
def test_tokens_are_those_of_one_process(model: str, layout: str) -> None:
    for found in given("equal", model, layout):
        check(model, found)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ranks", "layouts"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_every_layout_makes_the_tokens_of_one_process(
    model: str, ranks: int, layouts: list[str]
) -> None:
    possible = [
        layout
        for layout in layouts
        if not any(model == name and axis in layout for name, axis in IMPOSSIBLE)
    ]
    cases = [("equal", (model, layout)) for layout in possible]
    for of_rank in run_ranks(ranks, RANKS + "several", cases, timeout_s=380):
        for found in of_rank:
            check(model, found)


def test_a_rank_whose_text_ends_before_waits_for_no_other_under_zero3() -> None:
    assert given("unequal_lengths", "gpt") == [True, True]


@pytest.mark.slow
def test_a_rank_whose_text_by_transformers_ends_before_waits_for_no_other() -> None:
    assert run_ranks(2, RANKS + "unequal_lengths", "llama") == [True, True]


def test_a_training_with_texts_between_its_steps_is_the_one_without() -> None:
    assert given("training_goes_on", "gpt", "pp=2") == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "lora", "t5", "gpt"])
def test_a_training_goes_on_under_every_layout(model: str) -> None:
    layouts = [x for x in TWO if not any(model == name and axis in x for name, axis in IMPOSSIBLE)]
    cases = [("training_goes_on", (model, layout)) for layout in layouts]
    assert run_ranks(2, RANKS + "several", cases, timeout_s=380) == [[True] * len(cases)] * 2


def test_rank_0_prints_a_text_as_it_is_made_in_whole_letters() -> None:
    (pieces, text), (nothing, _) = given("shown", "gpt", "tp=2")
    assert nothing == []
    assert "".join(pieces) == text + "\n"
    # The last token's first byte is no letter yet; all that came before is shown by the next one.
    assert [len(piece) for piece in pieces] == [3, 1, 1, 1, 1, 1, 1]
    assert pieces[-2:] == ["\ufffd", "\n"]


def test_a_replica_makes_a_text_by_itself() -> None:
    assert given("on_one_rank") == [True, True]


@pytest.mark.slow
def test_policies_that_change_a_forward_leave_tokens_as_they_are() -> None:
    for found in run_ranks(2, RANKS + "with_policies", timeout_s=380):
        assert len(found) == 6
        assert all(found.values()), found


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("assistant", ["does not take assistant_model", "leave it out"]),
        ("other prompts", ["Ranks 0-1 got other values of input_ids", "they share samples"]),
        ("other seeds", ["Ranks 0-1 got other values of seed"]),
        ("hidden states", ["does not take output_hidden_states", "its own blocks"]),
        ("static cache", ["does not take cache_implementation", "its own blocks"]),
        ("sequence", ['under "tp=2"', "sequence=True", "other.load_from(layout)"]),
        ("cp", ['under "cp=2"', "a part of each sequence", "other.load_from(layout)"]),
        ("encoder", ['under "pp=2"', "a call of the encoder alone", "other.load_from(layout)"]),
        ("beams of a plain module", ["does not take num_beams for GPT", "there are do_sample"]),
        ("padded for a plain module", ["got input_ids, attention_mask for GPT", "without padding"]),
        ("no logits", ["returned (3, 16) where logits", "model(ids)"]),
        ("no text", ["BertForMaskedLM makes no text", "ForCausalLM"]),
    ],
)
def test_what_cannot_be_is_refused_in_words_on_all_ranks(what: str, words: list[str]) -> None:
    for found in given("refusals"):
        assert [word for word in words if word not in found[what]] == []
