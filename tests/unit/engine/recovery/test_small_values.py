"""Which values a peer keeps, and which of them a replacement rank takes back."""

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from nbdist.engine.recovery.small_values import Value, at, own, pick, size_of  # noqa: E402


def test_numbers_texts_tensors_and_containers_of_them_have_a_size() -> None:
    assert size_of({"a": [1, 2.0, "text"], "b": (None, True)}, 1000) is not None
    assert size_of(torch.zeros(10), 1000) == 104


@pytest.mark.parametrize(
    "value", [object(), [object()], torch.zeros(1, requires_grad=True), torch.nn.Linear(1, 1), len]
)
def test_what_is_more_than_a_plain_value_has_none(value: Any) -> None:
    assert size_of(value, 1000) is None


def test_of_a_large_container_no_more_is_looked_at_than_there_is_room_for() -> None:
    assert size_of([*range(10), object()], 100) == 112  # it would have none


def test_small_ones_go_first_as_long_as_there_is_room() -> None:
    assert pick({"large": 90, "b": 10, "a": 10, "mid": 30}, 60) == ["a", "b", "mid"]


def test_a_new_rank_takes_back_what_differed_and_names_what_was_too_large() -> None:
    before = {
        "same": Value("x", b"1"),
        "mine": Value("y", b"2"),
        "huge": Value("z", None),
        "only mine": Value("u", b"3"),
    }
    assert own(before, {"same": "x", "mine": "other", "huge": "other"}) == (
        ["mine", "only mine"],
        ["huge"],
    )


def test_values_are_compared_at_the_end_of_the_same_cell() -> None:
    moments = [(3, {"n": "three"}), (5, {"n": "five"})]
    three, five = {"n": "three"}, {"n": "five"}
    assert [at(moments, cell) for cell in (2, 3, 4, 6)] == [{}, three, three, five]
