"""Blocked time divided into transferring and waiting, and whom it was waited for."""

import random
from dataclasses import replace

import numpy as np
import pytest

from nbdist.client.metrics.analysis.analyst import Analyst
from nbdist.client.metrics.analysis.match import Arrivals
from nbdist.client.metrics.analysis.rows import CallRows, Waits
from nbdist.client.metrics.analysis.steps import split
from nbdist.client.metrics.analysis.values import ExplainedStep
from nbdist.shared.packed import Template
from nbdist.shared.wire import Record
from tests.unit.client.metrics.analysis.analysis_data import OneClock, Rank, template

close = pytest.approx


def explain(records: list[Record], n: int = 2, clock: OneClock | None = None) -> ExplainedStep:
    """Return the only step."""
    analyst = Analyst(range(n), clock or OneClock())
    (step,) = analyst.take(records, is_last=True)
    return step


def test_two_ranks_wait_in_an_all_reduce_for_the_third_that_computes_longer() -> None:
    t = template(ranks=(0, 1, 2))
    told = [
        Rank(0).tell(1, [(t, 1, 10, 10, 55)], [(10, 55)]),
        Rank(1).tell(1, [(t, 1, 12, 12, 56)], [(12, 56)]),
        Rank(2).tell(1, [(t, 1, 50, 50, 55)], [(50, 55)]),
    ]
    step = explain(told, 3)
    assert step.waiting_ms == close({0: 40, 1: 38, 2: 0})
    assert step.transfer_ms == close({0: 5, 1: 6, 2: 5})
    assert (step.skew_ms, step.last) == (close(40), 2)


def test_other_clocks_change_nothing_when_their_offset_is_known() -> None:
    t = template(ranks=(0, 1, 2))
    told = [
        Rank(0).tell(1, [(t, 1, 10, 10, 55)], [(10, 55)], base_ms=5),
        Rank(1).tell(1, [(t, 1, 2012, 2012, 2056)], [(2012, 2056)], base_ms=1990),
        Rank(2).tell(1, [(t, 1, 50, 50, 55)], [(50, 55)], base_ms=-3),
    ]
    step = explain(told, 3, OneClock(rank1=2_000_000_000))
    assert step.waiting_ms == close({0: 40, 1: 38, 2: 0})


def test_a_collective_that_has_arrived_hides_that_another_waits() -> None:
    first, second = template(bytes=8), template(bytes=4)
    told = [
        Rank(0).tell(1, [(first, 1, 0, 0, 30), (second, 2, 1, 1, 50)], [(5, 50)]),
        Rank(1).tell(1, [(first, 1, 10, 10, 30), (second, 2, 45, 45, 50)], [(45, 50)]),
    ]
    step = explain(told)
    # 5-10 both pending; 10-30 the first moves; 30-45 the second waits; 45-50 it moves
    assert step.waiting_ms == close({0: 5 + 15, 1: 0})
    assert step.transfer_ms == close({0: 20 + 5, 1: 5})


def test_what_is_queued_behind_a_collective_that_waits_is_waiting_too() -> None:
    first, second = template(bytes=8), template(bytes=4)
    told = [
        Rank(0).tell(1, [(first, 1, 0, 0, 22), (second, 2, 1, 22, 25)], [(2, 25)]),
        Rank(1).tell(1, [(first, 1, 20, 20, 22), (second, 2, 1, 22, 25)], [(20, 25)]),
    ]
    step = explain(told)
    assert step.waiting_ms == close({0: 18, 1: 0})
    assert step.transfer_ms == close({0: 5, 1: 5})


def test_a_receive_waits_for_its_sender() -> None:
    told = [
        Rank(0).tell(1, [(template("send", peer=1), 1, 30, 30, 31)], [(30, 31)]),
        Rank(1).tell(1, [(template("recv", peer=0), 1, 2, 2, 33)], [(2, 33)]),
    ]
    step = explain(told)
    assert step.waiting_ms == close({0: 0, 1: 28})
    assert step.transfer_ms == close({0: 1, 1: 3})
    assert (step.skew_ms, step.last) == (close(28), 0)


def test_a_send_waits_for_its_receiver_unless_it_was_over_before() -> None:
    big, small = template("send", peer=1, bytes=8), template("send", peer=1, bytes=4)
    there = [template("recv", peer=0, bytes=8), template("recv", peer=0, bytes=4)]
    told = [
        Rank(0).tell(1, [(big, 1, 0, 0, 25), (small, 2, 25, 25, 26)], [(0, 26)]),
        Rank(1).tell(1, [(there[0], 1, 20, 20, 25), (there[1], 2, 90, 90, 91)], [(20, 25)]),
    ]
    step = explain(told)
    assert step.waiting_ms[0] == close(20)
    assert step.transfer_ms[0] == close(6)


def test_messages_whose_tags_are_received_out_of_order_meet_by_their_tag() -> None:
    def ends(tag: int) -> tuple[Template, Template]:
        sent, got = template("send", peer=1, bytes=8 + tag), template("recv", peer=0, bytes=8 + tag)
        return replace(sent, tag=tag), replace(got, tag=tag)

    (send_a, recv_a), (send_b, recv_b) = ends(3), ends(4)
    told = [
        Rank(0).tell(1, [(send_a, 1, 10, 10, 11), (send_b, 1, 40, 40, 41)], [(10, 11), (40, 41)]),
        Rank(1).tell(1, [(recv_b, 1, 0, 0, 42), (recv_a, 1, 43, 43, 44)], [(0, 42), (43, 44)]),
    ]
    step = explain(told)
    # The first receive waits until 40 for what is sent second; the other was sent long before.
    assert step.waiting_ms == close({0: 0, 1: 40})


def test_a_receive_from_any_source_blames_nobody() -> None:
    told = [
        Rank(0).tell(1, [(template("send", peer=1), 1, 30, 30, 31)], [(30, 31)]),
        Rank(1).tell(1, [(template("recv"), 1, 2, 2, 33)], [(2, 33)]),
    ]
    step = explain(told)
    assert step.waiting_ms == close({0: 0, 1: 0})
    assert step.transfer_ms[1] == close(31)
    assert step.skew_ms is None


def test_the_receivers_of_a_broadcast_do_not_wait_for_one_who_comes_after_they_have_it() -> None:
    t = template("broadcast", ranks=(0, 1, 2))
    told = [
        Rank(0).tell(1, [(t, 1, 10, 10, 12)], [(10, 12)]),
        Rank(1).tell(1, [(t, 1, 0, 0, 12)], [(0, 12)]),
        Rank(2).tell(1, [(t, 1, 50, 50, 51)], [(50, 51)]),
    ]
    step = explain(told, 3)
    assert step.waiting_ms == close({0: 0, 1: 10, 2: 0})
    assert (step.skew_ms, step.last) == (close(50), 2)


def test_groups_that_share_numbers_do_not_meet() -> None:
    left, right = template(ranks=(0, 1), group="5"), template(ranks=(2, 3), group="6")
    told = [
        Rank(0).tell(1, [(left, 1, 0, 0, 11)], [(0, 11)]),
        Rank(1).tell(1, [(left, 1, 10, 10, 11)], [(10, 11)]),
        Rank(2).tell(1, [(right, 1, 500, 500, 521)], [(500, 521)]),
        Rank(3).tell(1, [(right, 1, 520, 520, 521)], [(520, 521)]),
    ]
    step = explain(told, 4)
    assert step.waiting_ms == close({0: 10, 1: 0, 2: 20, 3: 0})
    assert (step.skew_ms, step.last) == (close(20), 3)


@pytest.mark.parametrize("seed", range(30))
def test_the_division_is_what_its_definition_says_moment_by_moment(seed: int) -> None:
    dice = random.Random(seed)
    n, length = 3, 300
    rows: list[tuple[int, ...]] = []
    for rank in range(n):
        for _ in range(dice.randrange(12)):
            launch = dice.randrange(200)
            begin, end = sorted(launch + dice.randrange(90) for _ in range(2))
            arrived = dice.randrange(launch, end + 1)
            whom = dice.choice([r for r in range(n) if r != rank])
            rows.append((rank, launch, begin, end, arrived, whom if arrived > launch else -1))
    blocked = []
    for rank in range(n):
        edges = sorted(dice.sample(range(length), 2 * dice.randrange(1, 6)))
        blocked += [(rank, a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    table = np.array(rows, np.int64).reshape(-1, 6).T
    zero = np.zeros_like(table[0])
    launch, begin, end = table[1:4]
    calls = CallRows(table[0], zero, zero, zero, zero, launch, begin, end, zero, zero)
    w = np.array(blocked, np.int64).T
    divided = split(calls, Arrivals(*table[4:]), Waits(w[0], 0 * w[0], w[1], w[2]), w[0], n, n)

    waiting_for = np.zeros((n, n))
    exposed = np.zeros(n)
    for rank, a, b in blocked:
        mine = [row for row in rows if row[0] == rank]
        for t in range(a, b):
            exposed[rank] += 1
            moves = any(max(begin, arr) <= t < end for _, _, begin, end, arr, _ in mine)
            pending = [(arr, whom) for _, launch, _, _, arr, whom in mine if launch <= t < arr]
            candidates = {whom for arr, whom in pending if arr == max(pending)[0]}
            if pending and not moves:
                assert len(candidates) >= 1
                waiting_for[rank, min(candidates)] += 1
    assert (divided.waiting == waiting_for.sum(axis=1)).all()
    assert (divided.waiting + divided.transfer == exposed).all()
    ambiguous = abs(divided.waiting_for - waiting_for).sum()
    ties = len(rows) - len({(row[0], row[4]) for row in rows})
    assert ambiguous == 0 or ties
