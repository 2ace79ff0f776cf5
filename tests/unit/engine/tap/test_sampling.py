"""Which steps are told, whatever a step takes and holds."""

import pytest

from nbdist.engine.tap.sampling import CHEAP_ROWS, MOST_ROWS, MOST_STEPS, Stride


def _run(step_ms: float, calls: int, seconds: float = 20) -> tuple[Stride, float, float]:
    """Return the stride after so long, and steps and rows told a second in the last quarter."""
    stride, told = Stride(), 0
    steps = int(seconds * 1000 / step_ms)
    for step in range(1, steps + 1):
        if stride.tells(step):
            stride.told(int(step * step_ms * 1e6), calls)
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
    stride = Stride()
    assert stride.tells(1)
    seen, now_ns = [stride.every], 0
    for step in range(1, 5000):
        now_ns += 200_000 if step < 2000 else 500_000_000
        if stride.tells(step):
            stride.told(now_ns, 4)
        seen.append(stride.every)
    assert seen == sorted(seen)
    assert stride.every > 8
    assert bin(stride.every).count("1") == 1


def test_ranks_of_different_pace_tell_a_common_subset() -> None:
    slow, fast = _run(4, 4)[0], _run(1, 4)[0]
    assert slow.every < fast.every
    both = [step for step in range(1, 257) if slow.tells(step) and fast.tells(step)]
    assert both == [step for step in range(1, 257) if fast.tells(step)]
