"""Schedules that step too often are told once it lasts, and what explains it is not."""

from nbdist.client.metrics.checks.rules.schedules import RATE_STEPPED_TWICE
from nbdist.client.metrics.checks.uses import Seen, Step


def said(*turns: float | None, overwritten: float = 0.0) -> str:
    """Return what is said of reports, None where turns are not known."""
    known: list[dict[str, float]] = [{} if one is None else {"turns": one} for one in turns]
    values = [one | {"overwritten": overwritten} for one in known]
    steps = [Step(n, {0: one, 1: one}) for n, one in zip((2, 5, 10, 20), values, strict=False)]
    return RATE_STEPPED_TWICE.decide(Seen(steps))


def test_a_schedule_that_steps_as_often_too_much_each_time_is_told_with_the_number() -> None:
    assert "steps 4 times for each step of its optimizer, as in steps 2 to 10" in said(4, 4, 4)


def test_one_report_as_after_an_overflow_a_number_that_changes_and_an_unknown_one_are_not() -> None:
    assert said(2, 2) == ""
    assert said(2, 1, 1, 1) == ""
    assert said(2, 3, 2) == ""
    assert said(2, None, 2) == ""
    assert said(1, 1, 1) == ""


def test_two_schedules_of_which_one_overwrites_the_rate_are_told() -> None:
    assert "Two schedules step the learning rate" in said(1, 1, 1, overwritten=1.0)
    assert said(1, 1, overwritten=1.0) == ""
