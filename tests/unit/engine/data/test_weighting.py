"""Weights are positive numbers, one a part, and a loop that does not heed them is told once."""

from typing import Any

import pytest

from nbdist.engine.component import EndedCell
from nbdist.engine.data.order import weighting
from nbdist.shared.errors import UsageError

ENDED = EndedCell(1, "", has_succeeded=True)


def test_weights_are_kept_as_numbers_and_none_is_equal_parts() -> None:
    assert weighting.checked([1, 0.5], 2, 8) == (1.0, 0.5)
    assert weighting.checked(None, 2, 8) is None


@pytest.mark.parametrize(
    "wrong", [[], [1, 0], [1, -1], [1, float("nan")], [1, float("inf")], [1, True], [1, "2"], "12"]
)
def test_what_is_no_weight_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="are not valid weights"):
        weighting.checked(wrong, 2, 8)


def test_more_parts_than_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="4 samples has no 5 parts"):
        weighting.checked([1] * 5, 5, 4)


def test_only_a_step_whose_newest_batch_was_not_weighed_is_told_and_once() -> None:
    heed = weighting.Heed()
    heed.step()
    heed.give(weighting.UNHEEDED)
    heed.weigh()
    heed.step()
    heed.give("")
    heed.step()
    assert weighting.here.cell_ended(ENDED) == ()
    for _ in range(2):
        heed.give(weighting.UNHEEDED)
        heed.step()
    assert weighting.here.cell_ended(ENDED) == (weighting.UNHEEDED,)
    assert weighting.here.cell_ended(ENDED) == ()


def test_a_rest_that_is_shared_unequally_is_told_with_its_numbers_once_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weighting, "here", weighting.Unweighed())
    text = weighting.uneven(7, 2)
    assert "Of a batch of 7 samples some ranks had 4 and others 3" in text
    assert "count 33% more" in text
    for _ in range(2):  # loaders
        heed = weighting.Heed()
        heed.give(text)
        heed.step()
    assert weighting.here.cell_ended(ENDED) == (text,)


@pytest.mark.parametrize(("samples", "parts"), [(8, 2), (41, 2), (1, 2), (7, 1), (400, 3)])
def test_parts_that_are_alike_or_nearly_so_are_not_told(samples: int, parts: int) -> None:
    assert weighting.uneven(samples, parts) == ""


@pytest.mark.parametrize(
    ("paces", "parts", "weights"),
    [
        ([(0, 100.0), (1, 50.0)], 2, (1.0, 0.5)),
        ([(0, 100.0), (0, 20.0), (1, 50.0), (1, 90.0)], 2, (0.4, 1.0)),
        ([(0, 100.0), (1, 0.001)], 2, (1.0, 0.01)),
    ],
    ids=["a slow rank", "a part has its slowest rank's pace", "a rank that hardly moves"],
)
def test_measured_weights_follow_the_slowest_rank_of_each_part(
    paces: list[tuple[int, float]], parts: int, weights: tuple[float, ...]
) -> None:
    assert weighting.from_paces(paces, parts) == weights


@pytest.mark.parametrize(
    "paces",
    [[(0, 100.0), (1, 95.0)], [(0, 100.0), (1, 0.0)], [(0, 0.0), (1, 0.0)], [(0, 100.0)]],
    ids=["nearly alike", "a replacement", "nothing measured", "one part"],
)
def test_parts_stay_equal_where_paces_are_alike_or_unknown(
    paces: list[tuple[int, float]],
) -> None:
    assert weighting.from_paces(paces, len(paces)) is None
