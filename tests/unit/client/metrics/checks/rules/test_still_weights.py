"""Weights that never move are told, and those whose rate, gradients or rounding explain it not."""

from nbdist.client.metrics.checks.rules.still_weights import WEIGHTS_NEVER_MOVE
from nbdist.client.metrics.checks.uses import Seen, Step

RATE = 1e-5


def told(number: int, **changed: float) -> Step:
    values = {"sampled": 64.0, "still": 62.0, "rate": RATE, "peak": RATE} | changed
    return Step(number, {0: values, 1: values})


def said(*steps: Step) -> str:
    return WEIGHTS_NEVER_MOVE.decide(Seen(steps))


def test_what_is_sampled_and_the_rate_are_told_once_it_holds_at_two_reports() -> None:
    sentence = said(told(10), told(20))
    assert "Of 128 sampled weights" in sentence
    assert "124 are, bit for bit, what they were at step 1, 19 steps later" in sentence
    assert "a learning rate of 1e-05" in sentence
    assert said(told(20)) == ""
    assert said(told(2), told(5)) == ""


def test_a_rate_of_zero_a_warm_up_and_the_end_of_a_schedule_are_sound() -> None:
    assert said(told(10, rate=0.0), told(20, rate=0.0)) == ""
    assert said(told(10, rate=RATE / 9), told(20, rate=RATE / 5)) == ""
    assert said(told(10, rate=RATE / 5), told(20, rate=RATE / 9)) == ""
    assert said(told(10, rate=RATE), told(20, rate=2 * RATE, peak=2 * RATE)) == ""


def test_weights_without_gradients_or_of_full_precision_are_sound() -> None:
    assert said(told(10, sampled=0.0, still=0.0), told(20, sampled=0.0, still=0.0)) == ""
    full = [Step(number, {0: {"rate": RATE}, 1: {"rate": RATE}}) for number in (10, 20)]
    assert said(*full) == ""


def test_weights_of_which_a_part_moves_are_sound() -> None:
    assert said(told(10), told(20, still=40.0)) == ""
