"""Which step ranks look into together, by what each has kept."""

from dataclasses import replace
from typing import Any

import pytest

from nbdist.engine.checks.chosen_step import StepFacts, choose
from nbdist.shared.errors import UsageError


def kept(step: int, cell: int = 1, **more: Any) -> StepFacts:
    given = {"is_of_all": True, "forwards": 1, "has_weights": True} | more
    return StepFacts(cell, step, **given)


def test_without_a_step_the_refusal_says_what_leaves_one_out() -> None:
    with pytest.raises(UsageError, match="No step is kept that was left out") as error:
        choose([[], []], None)
    assert "--guard" in error.value.why


def test_the_newest_step_is_chosen_or_the_one_that_is_named() -> None:
    steps = [kept(3), kept(5)]
    assert choose([steps, steps], None).step == 5
    chosen = choose([steps, steps], 3)
    assert (chosen.step, chosen.ranks, chosen.why_not) == (3, (0, 1), {})


def test_a_step_that_is_not_kept_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="Step 4 is not kept") as error:
        choose([[kept(3), kept(5)]] * 2, 4)
    assert "3, 5" in error.value.why


def test_a_rank_that_has_lost_it_is_named() -> None:
    with pytest.raises(UsageError, match="Rank 1 has nothing of step 3 any more"):
        choose([[kept(3)], []], None)


def test_a_rank_that_trains_by_itself_looks_alone() -> None:
    mine = [kept(3, is_of_all=False)]
    assert choose([[], mine], None).ranks == (1,)
    older = [kept(9, 1, is_of_all=False)]
    chosen = choose([older, [kept(3, 2, is_of_all=False)]], None)
    assert (chosen.cell, chosen.step, chosen.ranks) == (2, 3, (1,))


def test_where_one_rank_cannot_run_its_forward_none_does() -> None:
    chosen = choose([[kept(3)], [kept(3, why_not="its model is gone")]], None)
    assert chosen.why_not == {1: "its model is gone"}


def test_ranks_with_other_numbers_of_forwards_would_wait_for_each_other() -> None:
    chosen = choose([[kept(3, forwards=2)], [kept(3)]], None)
    assert set(chosen.why_not) == {0, 1}


def test_weights_are_put_back_on_all_ranks_or_on_none() -> None:
    assert not choose([[kept(3)], [kept(3, has_weights=False)]], None).has_weights


def test_a_step_that_cannot_run_in_float32_is_refused_where_that_is_asked_for() -> None:
    steps = [[kept(3)], [kept(3, why_not_float32="fully_shard gathers its weights in bfloat16")]]
    assert choose(steps, None).step == 3
    with pytest.raises(UsageError, match="step 3 cannot run in float32 on rank 1") as error:
        choose(steps, None, fp32=True)
    assert error.value.why == "fully_shard gathers its weights in bfloat16"


def test_where_one_rank_cannot_run_its_backward_none_does() -> None:
    steps = [[kept(3, losses=1)], [kept(3, losses=1, why_no_backward="its layout is gone")]]
    chosen = choose(steps, None)
    assert (chosen.why_not, chosen.no_backward) == ({}, {1: "its layout is gone"})
    assert set(choose([[kept(3, losses=2)], [kept(3, losses=1)]], None).no_backward) == {0, 1}


def sound(step: int, **more: Any) -> StepFacts:
    return kept(step, **{"is_left_out": False, "has_weights": False} | more)


def test_what_was_left_out_goes_before_newer_steps_that_were_not() -> None:
    steps = [kept(3), sound(4, runs={1: (1,)})]
    assert choose([steps, steps], None).step == 3
    assert choose([steps[1:], steps[1:]], None).step == 4


def test_of_sound_steps_the_newest_is_chosen_that_all_ranks_have_made() -> None:
    runs = {1: (1,)}
    ahead = [sound(4, runs=runs), sound(5, runs=runs)]
    assert choose([ahead, ahead[:1]], None).step == 4


def test_steps_are_made_again_from_the_newest_start_that_ranks_have_in_common() -> None:
    runs = [{1: (1, 1, 1), 3: (1,)}, {1: (1, 1, 1), 2: (1, 1)}]
    chosen = choose([[sound(3, runs=one)] for one in runs], None)
    assert (chosen.begins, chosen.has_weights, chosen.why_not) == (1, True, {})


def test_ranks_that_would_make_other_numbers_of_forwards_again_do_not_begin() -> None:
    runs = [{1: (2, 1)}, {1: (1, 1)}]
    chosen = choose([[sound(2, runs=one)] for one in runs], None)
    assert chosen.begins is None
    assert set(chosen.why_not) == {0, 1}, "no rank has the weights of the step either"


def test_a_step_whose_weights_are_kept_runs_its_forward_also_where_its_loss_is_unknown() -> None:
    start = [replace(sound(1, why_no_run="its loss is not known"), has_weights=True)]
    chosen = choose([start, start], None)
    assert (chosen.begins, chosen.why_not, chosen.has_weights) == (None, {}, True)
    assert set(chosen.no_run) == {0, 1}


def test_one_rank_looks_alone_where_others_have_lost_the_step_and_it_needs_none() -> None:
    mine = [kept(3, is_alone=True)]
    assert choose([[], mine], 3, rank=1).ranks == (1,)
    assert choose([mine, mine], 3, rank=1).ranks == (0, 1), "its modules may need others"
    with pytest.raises(UsageError, match="Rank 0 has nothing of step 3"):
        choose([[], [kept(3)]], 3, rank=1)
    with pytest.raises(UsageError, match="Rank 7 has nothing of step 3") as error:
        choose([mine, mine], 3, rank=7)
    assert "ranks 0 to 1" in error.value.why


def test_a_step_that_is_not_kept_is_refused_with_the_steps_of_a_cell_that_keeps_all() -> None:
    steps = [sound(n) for n in (3, 5, 6, 7)]
    with pytest.raises(UsageError, match="Step 4 is not kept") as error:
        choose([steps, steps], 4)
    assert error.value.why.endswith("3, 5-7")
