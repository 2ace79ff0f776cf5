"""Rules on what ranks told: what is wrong is said, and chance or half a story is not."""

from collections.abc import Mapping

from nbdist.client.metrics.checks.rules.fp16 import STEP_PAST_SCALER, UNSCALED_FP16
from nbdist.client.metrics.checks.rules.gradients import (
    NEEDLESS_AVERAGING,
    OPTIMIZER_WITHOUT_GRADIENTS,
    UNSYNCED_GRADIENTS,
)
from nbdist.client.metrics.checks.rules.samples import UNEQUAL_SAMPLES_IN_GROUP
from nbdist.client.metrics.checks.rules.start import UNEQUAL_SHARDS
from nbdist.client.metrics.checks.uses import Seen, Step

Told = Mapping[int, Mapping[str, float]]


def seen(first: Told, *steps: Told) -> Seen:
    told = [Step(number, ranks) for number, ranks in enumerate(steps, 1)]
    return Seen(told or [Step(1, first)], Step(0, first))


def shards(*weights: float | None, groups: tuple[int, ...] = (0, 0)) -> dict[int, dict[str, float]]:
    """Return what ranks tell before the first step, None where weights are not known."""
    known = [{} if one is None else {"weights": one} for one in weights]
    return {r: {"shared_by": float(groups[r]), **one} for r, one in enumerate(known)}


def test_shards_of_different_weights_are_told_and_those_of_other_meshes_are_not() -> None:
    assert "began with different weights" in UNEQUAL_SHARDS.decide(seen(shards(1.0, 2.0)))
    assert UNEQUAL_SHARDS.decide(seen(shards(1.0, 1.0))) == ""
    assert UNEQUAL_SHARDS.decide(seen(shards(1.0, None))) == ""  # loaded since, on one rank
    assert UNEQUAL_SHARDS.decide(seen(shards(1.0, 2.0, groups=(0, 1)))) == ""


def test_half_precision_without_a_scaler_is_told_when_all_ranks_do_it_twice() -> None:
    bare = {rank: {"half": 1.0, "scalers": 0.0} for rank in range(2)}
    assert "its loss is not scaled" in UNSCALED_FP16.decide(seen({}, bare, bare))
    assert UNSCALED_FP16.decide(seen({}, bare)) == ""
    scaled = {rank: {"half": 1.0, "scalers": 1.0} for rank in range(2)}
    assert UNSCALED_FP16.decide(seen({}, scaled, scaled)) == ""
    full = {rank: {"half": 0.0, "scalers": 0.0} for rank in range(2)}
    assert UNSCALED_FP16.decide(seen({}, full, full)) == ""


def test_a_step_past_the_scaler_is_told_when_no_optimizer_of_the_step_was_scaled() -> None:
    past = {rank: {"scaled": 1.0, "unscaled": 0.0} for rank in range(2)}
    assert "steps with gradients that still are" in STEP_PAST_SCALER.decide(seen({}, past, past))
    assert STEP_PAST_SCALER.decide(seen({}, past)) == ""
    divided = {rank: {"scaled": 1.0, "unscaled": 1.0} for rank in range(2)}
    assert STEP_PAST_SCALER.decide(seen({}, divided, divided)) == ""


def test_an_optimizer_that_trains_nothing_is_told_unless_it_has_trained_or_all_is_frozen() -> None:
    idle = {rank: {"parameters": 4.0, "gradients": 0.0, "trained": 0.0} for rank in range(2)}
    said = OPTIMIZER_WITHOUT_GRADIENTS.decide(seen({}, idle, idle))
    assert "The optimizer of ranks 0-1 trains nothing: none of its 4 parameters" in said
    assert OPTIMIZER_WITHOUT_GRADIENTS.decide(seen({}, idle)) == ""
    for other in ({"trained": 1.0}, {"parameters": 0.0}):
        sound = {rank: told | other for rank, told in idle.items()}
        assert OPTIMIZER_WITHOUT_GRADIENTS.decide(seen({}, idle, sound)) == ""


def test_a_step_that_was_left_out_says_nothing_of_gradients() -> None:
    left_out: Told = {0: {"optimizer": 0.0}, 1: {"optimizer": 0.0}}
    assert OPTIMIZER_WITHOUT_GRADIENTS.decide(seen({}, left_out, left_out)) == ""


def test_samples_of_ranks_that_share_no_shards_are_not_compared() -> None:
    def fed(**more: float) -> dict[int, dict[str, float]]:
        return {rank: {"part": 0.0, "parts": 1.0, "input": float(rank), **more} for rank in (0, 1)}

    assert "get different samples" in UNEQUAL_SAMPLES_IN_GROUP.decide(seen({}, fed(), fed()))
    by_hand = fed(shared_by=0.0)
    assert UNEQUAL_SAMPLES_IN_GROUP.decide(seen({}, by_hand, by_hand)) == ""


def summed(**more: float) -> Seen:
    """Return two steps of three backwards, each of which adds to the gradients."""
    told = {rank: {"sums": 2.0, "averaged_bytes": 8.0, **more} for rank in (0, 1)}
    return Seen([Step(number, told) for number in (1, 2)])


def test_no_sync_is_advised_where_two_backwards_of_a_step_send_all_gradients() -> None:
    assert NEEDLESS_AVERAGING.decide(summed(sent_again=8.0))
    assert NEEDLESS_AVERAGING.decide(summed(sent_again=2.0)) == ""  # of batch norm, or a loss
    assert NEEDLESS_AVERAGING.decide(summed()) == ""  # not told: the tap is off


def test_no_sync_is_advised_only_where_the_cell_has_one_optimizer() -> None:
    def twice(optimizers: float) -> Seen:
        return summed(sent_again=8.0, optimizers=optimizers)

    assert "Each of 3 backwards of a step averages all gradients" in NEEDLESS_AVERAGING.decide(
        twice(1.0)
    )
    assert NEEDLESS_AVERAGING.decide(twice(2.0)) == ""  # a GAN: the third backward is the other's


def test_steps_of_a_model_before_it_do_not_count_where_nothing_was_sent_yet() -> None:
    told = {rank: {"parts": 2.0} for rank in range(2)}
    later = Seen([Step(5, told)], collectives=0.0)
    assert UNSYNCED_GRADIENTS.decide(later) == ""
    assert "5 steps, and no rank" in UNSYNCED_GRADIENTS.decide(
        Seen([Step(5, told), Step(9, told)], collectives=0.0)
    )
