"""Which step ranks look into together, by what each has kept."""

import pytest
import torch.distributed as dist

from nbdist.engine.checks import replay
from nbdist.engine.checks.replay import KeptStep, choose
from nbdist.engine.steps import guard
from nbdist.engine.steps.evidence import LeftOutStep
from nbdist.shared import plain
from nbdist.shared.errors import UsageError


def kept(step: int, cell: int = 1, **more: object) -> KeptStep:
    given = {"is_of_all": True, "forwards": 1, "has_weights": True} | more
    return KeptStep(cell, step, **given)  # type: ignore[arg-type]


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


def test_an_answer_about_many_modules_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: dict[str, float | None] = {f"block.{n}.{'x' * 80}": float(n) for n in range(4000)}
    norms |= {f"bad.{n}.{'x' * 80}": None for n in range(4000)}
    step = LeftOutStep(1, 3, 0.5, norms, False, lambda: None)
    monkeypatch.setattr(guard.here.evidence, "steps", [step])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda into, mine: into.__setitem__(0, mine))
    answer = replay.replay(None, False, {})
    assert (answer["modules"], answer["bad_modules"], answer["ran"]) == (8000, 4000, False)
    assert answer["why_not"] == "its model is not known, or is gone"
    assert list(answer["gradients"].values())[:64] == [None] * 64
    assert max(norm or 0 for norm in answer["gradients"].values()) == 3999
    assert plain.is_plain(answer)


def test_where_one_rank_cannot_run_its_backward_none_does() -> None:
    steps = [[kept(3, losses=1)], [kept(3, losses=1, why_no_backward="its layout is gone")]]
    chosen = choose(steps, None)
    assert (chosen.why_not, chosen.no_backward) == ({}, {1: "its layout is gone"})
    assert set(choose([[kept(3, losses=2)], [kept(3, losses=1)]], None).no_backward) == {0, 1}
