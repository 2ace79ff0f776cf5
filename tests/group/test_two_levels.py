"""Gradients averaged inside groups, and compressed between them, on four real ranks."""

from typing import Any

import pytest

from tests.group.harness import run_ranks


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(4, "tests.group.two_level_ranks:on_four_ranks", timeout_s=100)


@pytest.mark.parametrize("case", ["alone", "feedback"])
def test_gradients_are_sums_of_groups_rounded_also_after_a_lost_step(
    seen: list[dict[str, Any]], case: str
) -> None:
    assert [rank[case] for rank in seen] == [0] * 4


def test_what_a_group_cannot_halve_is_filled_up(seen: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(seen):
        times = 11 if rank < 2 else 1100
        assert found["odd"] == [[times * i for i in range(5)], [0, 0, 0]]


@pytest.mark.parametrize("level", ["inside", "between"])
def test_bytes_of_each_level_are_explained_within_1_percent(
    seen: list[dict[str, Any]], level: str
) -> None:
    for rank in seen:
        found = rank["sent"]
        assert found["explained"][level] == pytest.approx(found["counted"][level], rel=0.01)
        assert found["sum"] == sum(found["explained"].values())


def test_the_levels_are_told(seen: list[dict[str, Any]]) -> None:
    assert "inside groups of 2 ranks" in seen[0]["sent"]["text"]
    assert "between them sent as fp16, with error feedback, 50.0%" in seen[0]["sent"]["text"]


def test_groups_that_are_none_are_refused_with_the_numbers(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert "All 4 ranks are on one host" in rank["one host"]
        assert "between=3 does not cut 4 ranks" in rank["three"]
        assert "use one of 2" in rank["three"]
