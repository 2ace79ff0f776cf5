"""torch's own transformer modules: one process's numbers under tp, pp and cp, or words."""

from typing import Any

import pytest

from tests.group.harness import run_ranks

FLOOR = 1e-13  # float64: the order of summation


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, "tests.group.transformer_ranks:on_two_ranks", timeout_s=300)


@pytest.mark.parametrize(
    "case",
    [f"{kind} {layout}" for kind in ("Encoder", "Masked", "Padded") for layout in ("tp=2", "pp=2")]
    + ["Both tp=2", "Both pp=2", "Attending tp=2"]
    + [f"{kind} cp=2" for kind in ("MaskedPadded", "Asking", "Translating")],
)
def test_they_train_and_evaluate_as_in_one_process(
    two_ranks: list[dict[str, Any]], case: str
) -> None:
    for found in two_ranks:
        in_gradients, in_evaluation = found[case]
        assert in_gradients <= FLOOR
        assert in_evaluation <= FLOOR


def test_each_of_torchs_attentions_is_cut_by_heads(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        lines = found["explained"].splitlines()
        cut = [line.split()[0] for line in lines if "attention: each rank has some of its" in line]
        assert cut == ["own", "other", "by_head"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("Using cp=2", ["The weights of an nn.MultiheadAttention are used", "leave cp out"]),
        ("Own cp=2", ["with keys of its own", "add_zero_attn"]),
        ("Deciding tp=2", ["decides by the numbers", "if x_BT.sum() > 3", '"zero3"']),
        ("Deciding pp=2", ["decides by the numbers", "if x_BT.sum() > 3", '"zero3"']),
    ],
)
def test_what_cannot_be_cut_is_refused_in_words(
    two_ranks: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    for found in two_ranks:
        assert [word for word in words if word not in found[f"{case} refused"]] == []


@pytest.mark.slow
def test_each_is_cut_along_the_sequence_in_every_way() -> None:
    for found in run_ranks(2, "tests.group.transformer_ranks:cut_in_every_way", timeout_s=300):
        assert len(found) == 20
        assert {case: seen for case, seen in found.items() if max(seen) > FLOOR} == {}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ulysses", "gather"])
def test_bytes_of_an_encoder_and_a_decoder_are_those_that_were_explained(method: str) -> None:
    for sent, explained in run_ranks(2, "tests.group.transformer_ranks:sent_bytes", method):
        assert sent > 1_000
        assert sent == pytest.approx(explained, rel=0.01)
