"""The parameter server: what it computes is its own order of updates, replayed in one process."""

from functools import cache
from typing import Any

import pytest

from nbdist.client.faults.failures import Failure, is_consequence
from tests.group.harness import Outcome, run_ranks, try_ranks


@cache
def everything() -> list[Outcome]:
    return try_ranks(3, "tests.group.async_ranks:everything", timeout_s=90)


def seen(function: str) -> list[Any]:
    errors = [outcome.error for outcome in everything() if outcome.error]
    assert not errors, "\n".join(errors)
    return [outcome.value[function] for outcome in everything()]


def test_the_result_is_bit_for_bit_that_of_the_order_the_server_wrote_down() -> None:
    for found in seen("replayed"):
        assert found["by worker"] == [4, 6, 8]  # every update once, whatever each rank makes
        assert found["updates"] == 18
        assert found["versions"] is True
        assert (found["mean"], found["max"]) == (0, 0)
        assert found["difference"] == 0
        assert found["after more"] == 0


def test_all_ranks_end_with_the_same_parameters_and_only_the_server_has_the_order() -> None:
    found = seen("replayed")
    assert found[0]["hash"] == found[1]["hash"] == found[2]["hash"]
    assert [each["own order"] for each in found] == [0, 24, 0]
    assert found[0]["repr"].startswith("<AsyncSGD(SGD, server=1): staleness mean ")


def test_staleness_is_how_many_updates_came_between() -> None:
    found = seen("held_back")
    assert found[2]["newest"] == 6
    assert [each["max"] for each in found] == [6, 6, 6]
    assert found[0]["text"].endswith("max 6 over 7 updates")


def test_with_a_bound_fast_ranks_wait_and_no_update_is_staler() -> None:
    for found in seen("bounded"):
        assert found["max"] <= 3
        assert (found["updates"], found["dropped"]) == (21, 0)
        assert found["difference"] == 0


def test_a_rank_that_leaves_holds_nobody_up_and_what_it_brings_too_late_is_dropped() -> None:
    for found in seen("leaving"):
        assert (found["updates"], found["dropped"]) == (18, 1)


def test_a_cell_run_again_makes_no_more_groups_or_threads_and_wrong_numbers_are_refused() -> None:
    for rank, found in enumerate(seen("refused")):
        assert found["groups made again"] == 0
        assert found["threads"] == (2 if rank < 2 else 0)  # one a worker, of two servers so far
        assert "use one of 0 to 2" in found["server"]
        assert "use 2 or more" in found["bound"]
        assert "cannot take parameters later" in found["group"]


def test_who_is_ready_before_the_server_waits_for_it() -> None:
    assert [found["updates"] for found in seen("late_server")] == [3, 3, 3]


def test_learning_rates_are_each_workers_own_and_an_overflow_sends_nothing() -> None:
    wanted = sum(2.0 ** -(8 * rank) * 1.5 for rank in range(3))
    for found in seen("scheduled"):
        assert found["moved"] == pytest.approx(wanted, rel=1e-4)
        assert found["updates"] == 6


def test_an_optimizers_own_fields_are_the_servers_too() -> None:
    assert run_ranks(2, "tests.group.async_ranks:own_fields") == [[2, None]] * 2


def test_a_server_that_fails_says_of_what_and_frees_the_worker() -> None:
    server, worker = run_ranks(2, "tests.group.async_ranks:failing")
    assert "the server failed in applying an update: MemoryError: no room" in server
    assert is_consequence(Failure(1, "RuntimeError", worker)), worker
