"""What a training costs, and how often it should save."""

import math
import random

import pytest

from nbdist.shared.errors import UsageError
from nbdist.study.accelerators import ACCELERATORS
from nbdist.study.prices import (
    PRICES,
    Price,
    checkpoint_interval_s,
    lost_share,
    read_prices,
    seconds_between_failures,
    steps_to_loss,
)


def test_eight_devices_for_half_an_hour_cost_four_hours_of_one() -> None:
    assert Price(2.5).of(1800, 8) == pytest.approx(10.0)
    assert Price(2.5, "EUR").words(10.0) == "10.0 EUR"


def test_each_price_is_of_a_known_accelerator_and_names_its_source() -> None:
    assert set(PRICES) <= set(ACCELERATORS)
    assert all(price.source for price in PRICES.values())


def test_a_table_replaces_prices_and_keeps_the_others() -> None:
    table = read_prices('[h100]\nper_hour = 2\nsource = "ours"\n[our-chip]\nper_hour = 0.1')
    assert table["h100"] == Price(2, source="ours")
    assert table["our-chip"].per_hour == 0.1
    assert table["t4"] == PRICES["t4"]


@pytest.mark.parametrize(
    "text", ["[h100", "h100 = 2", "[h100]\nper_hour = -1", '[h100]\nper_hour = "2"', "[h100]\nx=1"]
)
def test_what_is_no_price_table_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"per_hour = 2\.49"):
        read_prices(text)


def test_llama_3s_16384_devices_fail_every_three_hours() -> None:
    assert seconds_between_failures(16_384) / 3600 == pytest.approx(3.1, abs=0.05)


def test_the_interval_is_youngs_where_saving_is_short_and_loses_least() -> None:
    saving, between = 10.0, 1e6
    best = checkpoint_interval_s(saving, between)
    assert best == pytest.approx(math.sqrt(2 * saving * between), rel=0.01)
    assert all(
        lost_share(best, saving, between) < lost_share(other * best, saving, between)
        for other in (0.7, 1.4)
    )


def test_where_saving_takes_longer_than_a_failure_the_interval_is_that_between_failures() -> None:
    assert checkpoint_interval_s(100.0, 40.0) == 40.0


def test_a_power_law_tells_when_it_reaches_a_loss() -> None:
    losses = [2.0 + 3.0 * step**-0.5 for step in range(1, 400)]
    found = steps_to_loss(losses, 2.1)
    assert found.steps == pytest.approx(900, rel=0.1)
    assert found.earliest <= 900 <= found.latest


def test_a_noisy_curve_gives_a_range_that_holds_the_truth() -> None:
    noise = random.Random(0)
    losses = [2.0 + 3.0 * step**-0.5 + noise.gauss(0, 0.02) for step in range(1, 400)]
    found = steps_to_loss(losses, 2.1)
    assert found.error == pytest.approx(0.02, rel=0.3)
    assert found.earliest < 900 < found.latest


def test_a_loss_below_the_curve_is_never_reached() -> None:
    losses = [2.0 + 3.0 * step**-0.5 for step in range(1, 400)]
    assert steps_to_loss(losses, 1.0).steps == math.inf


def test_losses_that_rise_or_are_few_are_refused() -> None:
    with pytest.raises(UsageError, match="do not fall"):
        steps_to_loss([float(step) for step in range(20)], 0.0)
    with pytest.raises(UsageError, match="eight"):
        steps_to_loss([3.0, 2.0], 1.0)
