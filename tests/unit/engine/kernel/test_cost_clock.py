"""What watching costs is clocked in some steps, and stands for all."""

import pytest

from nbdist.engine.kernel.cost_clock import PRICED, CostClock, Price

STEP_NS = 1_000_000


def _step(clock: CostClock, number: int, *, measured: bool, clocks_next: bool, **ns: int) -> None:
    if clock.is_on:
        for part, spent in ns.items():
            clock.add(part, spent)
    clock.end_step(number * STEP_NS, is_measured=measured, clocks_next=clocks_next)


def test_before_the_second_step_nothing_is_known() -> None:
    clock = CostClock()
    assert clock.summary() == {}
    _step(clock, 1, measured=True, clocks_next=True, tap=1)
    assert clock.summary() == {}


def test_steps_that_are_not_clocked_count_as_their_like() -> None:
    clock = CostClock()
    for number in range(100):
        measured, before_one = number % 10 == 0, number % 10 in (8, 9)
        hooks = 100_000 if measured else 10_000
        _step(clock, number + 1, measured=measured, clocks_next=before_one, tap=20_000, hooks=hooks)
    told = clock.summary()
    assert (told["steps"], told["step_us"], told["measured_share"]) == (100, 1000, 0.1)
    assert told["parts"]["tap"] == pytest.approx(20)
    assert told["parts"]["hooks"] == pytest.approx(0.1 * 100 + 0.9 * 10)
    assert told["parts"]["boundary"] == 0


def test_steps_that_are_counted_without_a_call_count_as_well() -> None:
    clock = CostClock()
    for number in range(9):
        _step(clock, number + 1, measured=False, clocks_next=False, tap=20_000)
    clock.others.steps += 10
    clock.last_ns = 19 * STEP_NS
    told = clock.summary()
    assert (told["steps"], told["step_us"]) == (19, 1000)
    assert told["parts"]["tap"] == pytest.approx(20)


def test_no_part_is_negative_where_one_is_called_outside_of_what_it_is_within() -> None:
    clock = CostClock()
    for number in (1, 2):
        _step(clock, number, measured=True, clocks_next=True, peers=50_000, boundary=-50_000)
    parts = clock.summary()["parts"]
    assert (parts["peers"], parts["boundary"]) == (50, 0)


def test_a_cell_without_steps_leaves_what_is_known_and_one_with_steps_counts_anew() -> None:
    clock = CostClock()
    for number in (1, 2):
        _step(clock, number, measured=True, clocks_next=False, tap=5)
    told = clock.summary()
    clock.begin_cell()
    assert clock.is_on
    _step(clock, 3, measured=True, clocks_next=False, tap=5)
    assert clock.summary() == {}  # of one step nothing is known
    clock.begin_cell()
    assert clock.summary() == {}
    assert told


def test_a_cell_that_trains_nothing_leaves_the_cost_of_the_one_that_did() -> None:
    clock = CostClock()
    for number in (1, 2):
        _step(clock, number, measured=True, clocks_next=False, tap=5)
    clock.end_cell()
    told = clock.summary()
    for _ in range(2):
        clock.begin_cell()
        clock.end_cell()
    assert clock.summary() == told != {}


def test_a_price_is_the_median_of_calls_that_are_not_the_first() -> None:
    price = Price()
    assert price.ns == 0
    for ns in [90_000] * PRICED + [4_000] + [2_000] * (PRICED - 1):
        assert price.is_wanted
        price.note(ns)
    assert (price.ns, price.is_wanted) == (2_000, False)
