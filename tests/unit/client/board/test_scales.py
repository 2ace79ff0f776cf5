import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.client.board.scales import (
    band,
    bulk_limits,
    decimate,
    padded,
    smooth,
)


def test_a_spike_one_step_long_survives_decimation() -> None:
    x = np.arange(10_000.0)
    y = np.zeros(10_000)
    y[4_321], y[7_654] = 9.0, -9.0

    few_x, few_y = decimate(x, y, 100)

    assert len(few_x) == len(few_y) <= 400
    assert few_y.max() == 9.0
    assert few_y.min() == -9.0
    assert few_x[few_y.argmax()] == 4_321


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=500))
def test_decimation_keeps_order_and_extremes_of_any_series(values: list[float]) -> None:
    x, y = np.arange(float(len(values))), np.array(values)
    finite = y[np.isfinite(y)]

    few_x, few_y = decimate(x, y, 20)

    assert (np.diff(few_x) >= 0).all()
    if len(finite):
        kept = few_y[np.isfinite(few_y)]
        assert kept.max() == finite.max()
        assert kept.min() == finite.min()


def test_decimated_points_stay_where_they_are_while_a_series_grows() -> None:
    y = np.random.default_rng(0).normal(size=2_000)
    x = np.arange(2_000.0)

    before, _ = decimate(x[:1_900], y[:1_900], 100)
    after, _ = decimate(x, y, 100)

    assert (before[:100] == after[:100]).all()


def test_a_running_mean_steps_over_what_is_not_finite() -> None:
    y = np.array([1.0, 1.0, np.nan, 1.0, np.inf, 1.0, 1.0])

    assert smooth(y, 3) == pytest.approx(np.ones(7))


def test_a_slow_first_step_does_not_flatten_the_rest() -> None:
    times_ms = np.concatenate([[450.0], np.full(99, 5.0) + np.linspace(0, 1, 99)])

    limits = bulk_limits([times_ms], include=0.0)

    assert limits is not None
    assert limits[0] == 0.0
    assert 6.0 < limits[1] < 15.0


def test_a_falling_loss_is_shown_from_top_to_bottom() -> None:
    loss = 2.3 * np.exp(-np.arange(300) / 40)

    assert bulk_limits([loss]) == pytest.approx((loss.min(), loss.max()))


def test_series_without_a_finite_value_have_no_limits() -> None:
    assert bulk_limits([np.array([np.nan, np.inf])]) is None
    assert bulk_limits([]) is None


def test_a_constant_series_has_limits_around_it() -> None:
    low, high = bulk_limits([np.full(5, 3.0)]) or (0.0, 0.0)

    assert low < 3.0 < high


def test_no_air_is_left_below_a_floor_of_zero() -> None:
    assert padded((0.0, 10.0), 0.0) == (0.0, 10.6)
    assert padded((5.0, 10.0), 0.0)[0] < 5.0


def test_a_band_holds_every_rank_at_every_step() -> None:
    x = np.arange(1.0, 11.0)
    lines = [(x, np.full(10, float(rank))) for rank in range(11)]

    columns, (low, tenth, median, ninetieth, high) = band(lines, 100)

    assert (columns == x).all()
    assert (low == 0.0).all()
    assert tenth == pytest.approx(np.full(10, 1.0))
    assert (median == 5.0).all()
    assert ninetieth == pytest.approx(np.full(10, 9.0))
    assert (high == 10.0).all()


def test_a_band_bears_ranks_of_unequal_length_and_values_that_are_not_finite() -> None:
    long, short = np.arange(1.0, 5.0), np.arange(1.0, 3.0)
    lines = [(long, np.array([1.0, np.nan, np.inf, 4.0])), (short, np.array([3.0, np.nan]))]

    _, spread = band(lines, 100)

    assert spread[0, [0, 3]].tolist() == [1.0, 4.0]
    assert spread[4, [0, 3]].tolist() == [3.0, 4.0]
    assert np.isnan(spread[:, 1]).all()
    assert np.isnan(spread[:, 2]).all()


def test_a_long_band_keeps_its_spikes() -> None:
    x = np.arange(1.0, 5_001.0)
    y = np.ones(5_000)
    y[2_500] = 7.0

    columns, spread = band([(x, y), (x, np.ones(5_000))], 100)

    assert len(columns) <= 100
    assert spread[4].max() == 7.0


def test_times_that_are_all_zero_are_shown_above_the_floor() -> None:
    assert bulk_limits([np.zeros(9)], include=0.0) == (0.0, 1.0)
