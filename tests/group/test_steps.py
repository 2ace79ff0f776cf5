"""Which optimizer ends a step; what a batch holds. Beside torch, for the module imports it."""

from collections import deque

from nbdist.engine.training.steps import Size, StepRule, size_of, steps_in_pass, take_used


def closed(calls: str) -> str:
    """Return the calls that ended a step, of optimizers named by one letter each."""
    rule = StepRule()
    return "".join(name for name in calls if rule.leads(ord(name)) or rule.closes(ord(name)))


def test_the_optimizer_that_steps_last_in_an_iteration_ends_the_steps_from_the_second_on() -> None:
    assert closed("aaa") == "aaa"
    assert closed("ababab") == "abb"
    assert closed("abcabcabc") == "acc"


def test_steps_are_as_many_as_iterations_however_many_optimizers_step_in_one() -> None:
    for iteration in ("a", "ab", "abc", "abcdefgh"):
        for count in (1, 2, 3, 10):
            assert len(closed(iteration * count)) == count


def test_an_optimizer_that_steps_twice_in_between_takes_its_place() -> None:
    assert closed("abbbb") == "abbb"
    assert closed("abbabbabb") == "abbbbb"
    assert closed("aaaaabaaaaab") == "aaaaaaaaaa"
    assert closed("abaaaa") == "aaaa"


def test_a_step_that_is_left_out_of_those_in_turn_moves_the_lead_for_one_step() -> None:
    assert closed("ab" * 5 + "a" + "ab" * 4) == "abbbb" + "a" + "bbb"
    assert closed("ab" * 5 + "b" + "ab" * 4) == "abbbb" + "b" + "bbbb"
    assert closed("ab" * 5 + "a" * 5) == "abbbb" + "aaaa"


def test_the_lead_goes_to_the_last_once_in_a_training_and_again_in_the_next() -> None:
    assert closed("aabaabaab") == "aaaaaa"
    assert closed("abab" + "aabaab") == "ab" + "aaa"
    rule = StepRule()
    ends = [rule.closes(one, is_new=is_new) for one, is_new in _TWO_GANS]
    assert ends == [True, False, False, True, False, True] * 2


_TWO_GANS = [(1, False), (2, False)] * 3 + [(3, True), (4, False)] + [(3, False), (4, False)] * 2


def test_an_optimizer_that_was_made_since_the_last_step_begins_another_training() -> None:
    rule = StepRule()
    assert rule.closes(1)
    assert rule.closes(2, is_new=True)
    assert rule.closes(2)
    assert not rule.closes(1)


def test_steps_in_a_pass_follow_accumulation_and_ignore_what_is_fetched_ahead() -> None:
    assert steps_in_pass(100, batches_taken=1, steps_made=1, backwards=1) == 100
    assert steps_in_pass(100, batches_taken=2, steps_made=1, backwards=1) == 100
    assert steps_in_pass(10, batches_taken=4, steps_made=1, backwards=4) == 3
    assert steps_in_pass(100, batches_taken=5, steps_made=5, backwards=2) == 100


def test_samples_are_the_first_dimension_of_the_first_tensor() -> None:
    import torch

    x = torch.ones(6, 2)
    assert size_of(x).samples == 6
    assert size_of([("name", x), torch.ones(3)]).samples == 6
    assert size_of({"ids": x, "other": 1}).samples == 6
    assert size_of(torch.tensor(1.0)).samples == 0
    assert size_of("text").samples == 0
    assert size_of([[[[x]]]]).samples == 0


def test_a_step_uses_a_batch_a_backward_and_leaves_what_was_fetched_ahead() -> None:
    assert sum(take_used(deque([8]), backwards=1)) == 8
    assert sum(take_used(deque([8]), backwards=2)) == 8
    assert sum(take_used(deque([2, 2, 2, 2]), backwards=4)) == 8
    assert sum(take_used(deque([8, 5]), backwards=1)) == 8
    assert sum(take_used(deque([1, 1, 1, 1, 1]), backwards=1)) == 3
    assert sum(take_used(deque(), backwards=1)) == 0


def test_tokens_are_the_elements_of_the_first_tensor_that_an_embedding_takes() -> None:
    import torch

    ids = torch.ones(4, 7, dtype=torch.int64)
    assert size_of(ids) == Size(4, 28)
    assert size_of({"mask": ids.bool(), "ids": ids.int(), "labels": ids[:, :3]}) == Size(4, 28)
    assert size_of([torch.ones(4, 3), torch.ones(4, dtype=torch.int64)]) == Size(4, 0)
    assert size_of(torch.ones(4, 3, 8, 8, dtype=torch.uint8)) == Size(4, 0)  # pixels
    assert size_of([[[[ids]]]]) == Size(0, 0)
