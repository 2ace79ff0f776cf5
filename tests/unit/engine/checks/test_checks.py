"""The next step of which ranks tell is known without asking each."""

from nbdist.engine.checks.checks import EVERY, is_due, next_due


def test_the_next_step_that_is_due_is_the_first_one_behind() -> None:
    for step in range(3 * EVERY):
        assert next_due(step) == next(n for n in range(step + 1, step + 1 + EVERY) if is_due(n))
