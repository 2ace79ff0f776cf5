"""Which steps are told, whatever a step takes and holds."""

import pytest

from nbdist.engine.tap.sampling import (
    CHEAP_ROWS,
    FIRST_STEPS,
    MOST_MEASURED,
    MOST_ROWS,
    MOST_STEPS,
    Measuring,
    StepSampling,
    is_chosen,
)


def _run(step_ms: float, calls: int, seconds: float = 20) -> tuple[StepSampling, float, float]:
    """Return the stride after so long, and steps and rows told a second in the last quarter."""
    stride, told = StepSampling(), 0
    steps = int(seconds * 1000 / step_ms)
    for step in range(1, steps + 1):
        if stride.samples(step):
            stride.sampled(int(step * step_ms * 1e6), calls)
            told += step > steps * 3 // 4
    return stride, told / (seconds / 4), told * calls / (seconds / 4)


def test_long_steps_are_all_told() -> None:
    assert _run(100, 40)[0].every == 1
    assert _run(1000, 300)[0].every == 1


@pytest.mark.parametrize(("step_ms", "calls"), [(0.7, 1), (1, 3), (5, 4), (10, 8), (30, 200)])
def test_short_steps_are_told_often_enough_and_no_oftener(step_ms: float, calls: int) -> None:
    _, steps, rows = _run(step_ms, calls)
    assert steps >= 4 or rows > MOST_ROWS / 2
    assert rows <= CHEAP_ROWS or steps < 8
    assert steps <= MOST_STEPS
    assert rows <= MOST_ROWS


def test_the_first_step_is_told_and_the_stride_is_a_power_of_two_that_never_falls() -> None:
    stride = StepSampling()
    assert stride.samples(1)
    seen, now_ns = [stride.every], 0
    for step in range(1, 5000):
        now_ns += 200_000 if step < 2000 else 500_000_000
        if stride.samples(step):
            stride.sampled(now_ns, 4)
        seen.append(stride.every)
    assert seen == sorted(seen)
    assert stride.every > 8
    assert bin(stride.every).count("1") == 1


def test_ranks_of_different_pace_tell_a_common_subset() -> None:
    slow, fast = _run(4, 4)[0], _run(1, 4)[0]
    assert slow.every < fast.every
    both = [step for step in range(1, 257) if slow.samples(step) and fast.samples(step)]
    assert both == [step for step in range(1, 257) if fast.samples(step)]


def _measure(step_ms: float, steps: int) -> list[int]:
    """Return which steps were measured."""
    measuring, measured = Measuring(), []
    for step in range(1, steps + 1):
        if measuring.measures(step):
            measured.append(step)
            measuring.measured(step, int(step * step_ms * 1e6))
    return measured


@pytest.mark.parametrize("step_ms", [0.3, 1, 3, 10, 20])
def test_of_short_steps_about_half_a_dozen_a_second_are_measured(step_ms: float) -> None:
    later = [step for step in _measure(step_ms, 20_000) if step > 10_000]
    seconds = 10_000 * step_ms / 1e3
    assert 0.45 * MOST_MEASURED <= len(later) / seconds <= 1.05 * MOST_MEASURED


def test_long_steps_are_all_measured() -> None:
    assert len(_measure(126, 500)) == 500


def test_the_first_steps_of_a_cell_are_all_measured() -> None:
    assert _measure(1, 2000)[:FIRST_STEPS] == list(range(1, FIRST_STEPS + 1))


def test_what_a_stride_chooses_a_smaller_one_chooses_too() -> None:
    for power in range(10):
        large = {step for step in range(1, 20_000) if is_chosen(step, 2 << power)}
        small = {step for step in range(1, 20_000) if is_chosen(step, 1 << power)}
        assert large < small
        assert len(large) == pytest.approx(20_000 / (2 << power), rel=0.02, abs=2)


@pytest.mark.parametrize("every", [2, 5, 8, 10, 16, 50, 64, 100])
@pytest.mark.parametrize("stride", [4, 16, 64])
def test_what_a_loop_does_every_so_many_steps_is_met_as_often_as_it_is_done(
    every: int, stride: int
) -> None:
    chosen = [step for step in range(1, 100_001) if is_chosen(step, stride)]
    met = sum(step % every == 0 for step in chosen)
    assert met / len(chosen) == pytest.approx(1 / every, rel=0.25)
