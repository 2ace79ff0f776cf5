"""Elements that count more on some ranks are said; whoever weighs them, or meets chance, is not."""

from nbdist.client.metrics.checks.rules.unequal_means import UNEQUAL_MEANS
from nbdist.client.metrics.checks.uses import Seen, Step

PLACES = [{"part": float(rank), "parts": 2.0} for rank in range(2)]
NUMBERS = (2, 5, 10, 20)


def said(
    *steps: tuple[int, ...],
    places: list[dict[str, float]] = PLACES,
    samples: tuple[float, ...] = (),
    factors: tuple[float, ...] = (),
) -> str:
    """Return what is said of steps: over how many elements each rank's loss is a mean."""
    told = [
        Step(
            number,
            {
                rank: {"counted": float(count), "each": factor / count} | places[rank]
                for rank, (count, factor) in enumerate(
                    zip(counts, factors or (1.0,) * len(counts), strict=True)
                )
            },
            samples=dict(enumerate(samples)),
        )
        for number, counts in zip(NUMBERS, steps, strict=False)
    ]
    return UNEQUAL_MEANS.decide(Seen(told))


def test_ranks_counts_and_how_much_more_one_counts_are_named() -> None:
    sentence = said((40, 10), (40, 10), (40, 10))
    assert "a mean over 10 elements on rank 1 and 40 on rank 0 at step 2," in sentence
    assert "an element of rank 1 counts 4.00 times as much as one of rank 0." in sentence


def test_of_two_steps_nothing_is_said() -> None:
    assert said((40, 10), (40, 10)) == ""


def test_of_counts_that_differ_a_little_nothing_is_said() -> None:
    assert said((150, 130), (140, 160), (155, 135)) == ""


def test_one_step_that_is_far_apart_is_not_enough() -> None:
    assert said((40, 40), (40, 20), (40, 40), (40, 40)) == ""


def test_lengths_that_differ_in_turn_are_said_too() -> None:
    assert said((40, 10), (10, 40), (40, 10)) != ""


def test_a_loss_that_is_weighed_by_what_is_kept_is_not() -> None:
    assert said((40, 10), (40, 10), (40, 10), factors=(1.6, 0.4)) == ""


def test_a_loss_that_a_rank_multiplies_is_not_a_matter_of_counts() -> None:
    assert said((6, 6), (6, 6), (6, 6), factors=(1.0, 1000.0)) == ""
    assert said((6, 12), (6, 12), (6, 12), factors=(1.0, 1000.0)) == ""


def test_batches_with_unequal_numbers_of_samples_are_told_by_the_loader() -> None:
    assert said((40, 10), (40, 10), (40, 10), samples=(4.0, 1.0)) == ""
    assert said((40, 10), (40, 10), (40, 10), samples=(4.0, 4.0)) != ""


def test_ranks_of_one_part_are_compared_with_the_others_alone() -> None:
    places = [{"part": float(rank // 2), "parts": 2.0} for rank in range(4)]
    counts = (40, 40, 10, 10)
    assert "10 elements on rank 2 and 40 on rank 0" in said(counts, counts, counts, places=places)
    of_sequences = (40, 10, 40, 10)  # as with a part of each sequence on each rank
    assert said(of_sequences, of_sequences, of_sequences, places=places) == ""


def test_models_of_a_ranks_own_or_of_other_groups_are_not_compared() -> None:
    steps = ((40, 10),) * 3
    assert said(*steps, places=[{}, {}]) == ""
    assert said(*steps, places=[PLACES[0], {}]) == ""
    groups = [PLACES[rank] | {"shared_by": float(rank)} for rank in range(2)]
    assert said(*steps, places=groups) == ""
    one = [PLACES[rank] | {"shared_by": 0.0} for rank in range(2)]
    assert said(*steps, places=one) != ""


def test_where_a_rank_tells_nothing_nothing_is_said() -> None:
    steps = [
        Step(number, {0: {"counted": 40.0, "each": 1 / 40} | PLACES[0], 1: dict(PLACES[1])})
        for number in NUMBERS
    ]
    assert UNEQUAL_MEANS.decide(Seen(steps)) == ""
