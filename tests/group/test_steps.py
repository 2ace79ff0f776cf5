"""Which optimizer ends a step; what a batch holds. Beside torch, for the module imports it."""

from collections import deque

from nbdist.engine.training.steps import StepRule, samples_in, steps_in_pass, take_samples


def closed(calls: str) -> str:
    """Return the calls that ended a step, of optimizers named by one letter each."""
    rule = StepRule()
    return "".join(name for name in calls if rule.closes(ord(name)))


def test_the_optimizer_that_steps_first_ends_the_steps() -> None:
    assert closed("aaa") == "aaa"
    assert closed("ababab") == "aaa"
    assert closed("abcabcabc") == "aaa"


def test_an_optimizer_that_steps_twice_in_between_takes_its_place() -> None:
    assert closed("abbbb") == "abbb"
    assert closed("abbabbabb") == "abbbbb"
    assert closed("aaaaabaaaaab") == "aaaaaaaaaa"


def test_steps_in_a_pass_follow_accumulation_and_ignore_what_is_fetched_ahead() -> None:
    assert steps_in_pass(100, batches_taken=1, steps_made=1, backwards=1) == 100
    assert steps_in_pass(100, batches_taken=2, steps_made=1, backwards=1) == 100
    assert steps_in_pass(10, batches_taken=4, steps_made=1, backwards=4) == 3
    assert steps_in_pass(100, batches_taken=5, steps_made=5, backwards=2) == 100


def test_samples_are_the_first_dimension_of_the_first_tensor() -> None:
    import torch

    x = torch.ones(6, 2)
    assert samples_in(x) == 6
    assert samples_in([("name", x), torch.ones(3)]) == 6
    assert samples_in({"ids": x, "other": 1}) == 6
    assert samples_in(torch.tensor(1.0)) == 0
    assert samples_in("text") == 0
    assert samples_in([[[[x]]]]) == 0


def test_a_step_uses_a_batch_a_backward_and_leaves_what_was_fetched_ahead() -> None:
    assert take_samples(deque([8]), backwards=1) == 8
    assert take_samples(deque([8]), backwards=2) == 8
    assert take_samples(deque([2, 2, 2, 2]), backwards=4) == 8
    assert take_samples(deque([8, 5]), backwards=1) == 8
    assert take_samples(deque([1, 1, 1, 1, 1]), backwards=1) == 3
    assert take_samples(deque(), backwards=1) == 0
