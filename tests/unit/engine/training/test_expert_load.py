"""What a rank tells of its experts' tokens."""

from nbdist.engine.training.expert_load import ExpertLoad


def test_tokens_of_forwards_of_one_step_are_added_up() -> None:
    load = ExpertLoad()
    load.note("experts", 2, [3, 1], 2.0)
    load.note("experts", 2, [1, 1], 2.0)
    assert load.take(10**18)[1] == {"experts:2": 4.0, "experts:3": 2.0}


def test_experts_of_another_layout_are_counted_anew() -> None:
    load = ExpertLoad()
    load.note("experts", 0, [3, 1, 5, 2], 2.0)  # a forward without a step, then ep=4 for ep=2
    load.note("experts", 2, [4, 6], 2.0)
    assert load.take(10**18)[1] == {"experts:2": 4.0, "experts:3": 6.0}
