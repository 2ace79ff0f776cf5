"""What computation owes its virtual device."""

import pytest

from nbdist.study.debt import MOST_CREDIT_S, Debt, share_kept


def test_a_computation_sleeps_for_what_it_was_too_fast() -> None:
    debt = Debt()
    assert debt.charge(0.010, 0.002) == pytest.approx(0.008)
    debt.slept(0.008)
    assert debt.settle() == pytest.approx(0)
    assert (debt.virtual_s, debt.late_s) == (0.010, 0)


def test_short_debts_add_up_until_they_are_worth_a_sleep() -> None:
    debt = Debt()
    assert [debt.charge(0.0004, 0) for _ in range(3)] == [0, 0, pytest.approx(0.0012)]


def test_a_collective_waits_for_the_shortest_debt() -> None:
    debt = Debt()
    assert debt.charge(0.0004, 0) == 0
    assert debt.settle() == pytest.approx(0.0004)


def test_a_sleep_that_was_too_long_is_made_up_for() -> None:
    debt = Debt()
    debt.charge(0.010, 0)
    debt.slept(0.013)
    assert debt.charge(0.010, 0) == pytest.approx(0.007)


def test_what_is_late_at_a_collective_stays_late() -> None:
    debt = Debt()
    debt.charge(0.010, 0.030)
    assert debt.settle() == 0
    assert debt.late_s == pytest.approx(0.020)
    assert debt.charge(0.010, 0) == pytest.approx(0.010)
    assert share_kept(debt.virtual_s, debt.late_s) == pytest.approx(0.5)


def test_no_more_than_some_time_can_be_made_up_for() -> None:
    debt = Debt()
    debt.charge(0.010, 1.010)
    assert debt.late_s == pytest.approx(1 - MOST_CREDIT_S)
    assert debt.charge(MOST_CREDIT_S + 0.005, 0) == pytest.approx(0.005)


def test_the_count_begins_again_and_what_is_owed_stays() -> None:
    debt = Debt()
    debt.charge(0.0004, 0)
    debt.begin_again()
    assert debt.virtual_s == 0
    assert debt.settle() == pytest.approx(0.0004)
