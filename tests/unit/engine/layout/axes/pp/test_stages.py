"""Stages of a pipeline: balance, places, bubbles, numbers that work."""

import itertools
import re

import pytest

from nbdist.engine.layout.axes.pp.stages import (
    balanced,
    bubble,
    check_microbatches,
    count_for,
    first_blocks,
    rank_of,
    stages,
)
from nbdist.engine.layout.policies.policies import Pipeline
from nbdist.shared.errors import LayoutError


def test_the_heaviest_stage_is_as_light_as_any_cut_makes_it() -> None:
    costs = [7.0, 1, 1, 5, 3, 2, 9, 1]

    def heaviest(firsts: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((*firsts, len(costs))))

    for parts in range(1, len(costs) + 1):
        cuts = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), parts - 1)]
        assert heaviest(tuple(balanced(costs, parts))) == min(map(heaviest, cuts))


def test_stages_of_equal_blocks_are_even() -> None:
    assert balanced([1.0] * 8, 4) == [0, 2, 4, 6]
    # Nothing is lighter than the first; the others still share.
    assert balanced([9.0, 1, 1, 1, 1], 3) == [0, 1, 3]


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("1f1b", [0, 1]),
        ("gpipe", [0, 1]),
        ("interleaved", [0, 1, 0, 1]),
        ("zero-bubble", [0, 1, 0, 1]),
        ("zbv", [0, 1, 1, 0]),
    ],
)
def test_a_schedule_says_which_rank_has_which_stage(schedule: str, ranks: list[int]) -> None:
    assert [rank_of(stage, schedule, 2) for stage in range(len(ranks))] == ranks


def test_more_micro_batches_and_stages_leave_less_to_wait_for() -> None:
    assert bubble("1f1b", 4, 8) == 3 / 11
    assert bubble("gpipe", 4, 8) == 3 / 11
    assert bubble("interleaved", 4, 8) == 3 / 19
    assert bubble("zero-bubble", 4, 8) < bubble("interleaved", 4, 8)
    assert bubble("zbv", 4, 8) == 0


@pytest.mark.parametrize(
    ("schedule", "microbatches", "pp", "nearest"),
    [("1f1b", 2, 4, 4), ("interleaved", 7, 3, 8), ("zero-bubble", 1, 2, 2), ("zbv", 2, 2, 3)],
)
def test_micro_batches_that_cannot_be_ordered_are_refused_with_the_nearest(
    schedule: str, microbatches: int, pp: int, nearest: int
) -> None:
    with pytest.raises(LayoutError, match=rf"microbatches={nearest}\) is the nearest"):
        check_microbatches(Pipeline(schedule, microbatches), pp)
    check_microbatches(Pipeline(schedule, nearest), pp)


def test_a_share_smaller_than_the_micro_batches_is_refused() -> None:
    count_for(16, Pipeline("1f1b", 8), 2)
    with pytest.raises(LayoutError, match=r"give 8 samples, or Pipeline\(microbatches=5\)"):
        count_for(5, Pipeline("1f1b", 8), 2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_no_advice_leads_to_the_next_refusal(schedule: str, pp: int) -> None:
    for samples, microbatches in itertools.product(range(1, 25), range(1, 13)):
        policy = Pipeline(schedule, microbatches)
        try:
            check_microbatches(policy, pp)
            count_for(samples, policy, pp)
        except LayoutError as error:
            offered = re.search(r"or Pipeline\(microbatches=(\d+)\)", error.do)
            if offered:
                other = Pipeline(schedule, int(offered[1]))
                check_microbatches(other, pp)
                count_for(samples, other, pp)


def test_of_numbers_that_divide_a_share_one_is_offered_that_the_schedule_can_order() -> None:
    with pytest.raises(LayoutError, match=r"give 3 or 6 samples, or Pipeline\(microbatches=4\)"):
        count_for(4, Pipeline("zbv", 3), 2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_without_a_number_a_share_is_cut_into_one_that_divides_it(schedule: str, pp: int) -> None:
    policy = Pipeline(schedule)
    for samples in range(1, 40):
        try:
            count = count_for(samples, policy, pp)
        except LayoutError as error:
            offered = re.search(r"give (\d+) samples", error.do)
            assert offered is not None
            count_for(int(offered[1]), policy, pp)
        else:
            assert samples % count == 0
            check_microbatches(Pipeline(schedule, count), pp)
    assert count_for(48, policy, 2) == 8


def test_batch_norm_gets_no_micro_batches_of_one_sample() -> None:
    assert count_for(8, Pipeline(), 2) == 8
    assert count_for(8, Pipeline(), 2, least=2) == 4
    with pytest.raises(LayoutError, match=r"of 2 samples, which batch norm needs"):
        count_for(3, Pipeline(), 2, least=2)
    with pytest.raises(LayoutError) as refused:
        count_for(10, Pipeline("1f1b", 4), 2, least=2)
    assert "microbatches=5" in refused.value.do
    with pytest.raises(LayoutError) as refused:
        count_for(6, Pipeline("1f1b", 4), 2, least=2)
    assert "microbatches=3" in refused.value.do


def test_a_smaller_last_batch_is_to_be_left_out_before_anything_else() -> None:
    with pytest.raises(LayoutError) as refused:
        count_for(6, Pipeline("1f1b", 4), 2, before=16)
    assert refused.value.do == (
        "leave a smaller last batch out, with drop_last=True in the loader: shares of 16 went "
        "before, or Pipeline(microbatches=2)"
    )


def test_blocks_may_be_named_or_numbered() -> None:
    blocks = [f"layers.{i}" for i in range(6)]
    costs = [1.0] * 6
    assert first_blocks(Pipeline(split=["layers.0", 4]), 2, blocks, costs) == [0, 4]


def test_a_parameter_that_no_forward_uses_stays_beside_its_neighbours() -> None:
    uses = {"a": frozenset({0}), "b": frozenset({1}), "idle": frozenset[int]()}
    sizes, places = dict.fromkeys(uses, 3), dict.fromkeys(uses, 1)
    made = stages(Pipeline(), 2, ["x", "y"], [0, 1], uses, sizes, places, [3.0, 3.0])
    assert [stage.parameters for stage in made] == [("a",), ("b", "idle")]
    assert [stage.numbers for stage in made] == [3, 6]
    assert [stage.share for stage in made] == [0.5, 0.5]
