"""What is explained when, and what becomes of records that are late, lost or too many."""

import pytest

from nbdist.client.metrics.analysis import analyst as analyst_module
from nbdist.client.metrics.analysis.analyst import LATE_S, MOST_LENGTHS, Analyst
from nbdist.client.metrics.analysis.stragglers import StragglerDetector
from nbdist.client.metrics.analysis.values import RECENT
from nbdist.shared.packed import Calls
from nbdist.shared.wire import Record
from tests.unit.client.metrics.analysis.analysis_data import OneClock, Rank, template

close = pytest.approx
TWO = template()


def both(step: int, late_ms: float = 4.0) -> list[Record]:
    """Rank 1 comes `late_ms` after rank 0 to the one all_reduce of a step of 20 ms."""
    at = step * 20
    calls = [(TWO, step, at, at, at + 10)]
    return [
        Rank(0).tell(step, calls, [(at, at + 10)], base_ms=at - 5, end_ms=at + 15),
        Rank(1).tell(step, [(TWO, step, at + late_ms, at + late_ms, at + 10)], base_ms=at - 5),
    ]


def test_a_step_is_explained_when_all_ranks_have_told_it_and_in_order() -> None:
    analyst = Analyst((0, 1), OneClock())
    (a0, a1), (b0, b1) = both(1), both(2)
    assert analyst.take([a0, b0], is_last=False) == []
    assert [step.step for step in analyst.take([a1, b1], is_last=False)] == [1, 2]
    assert analyst.analysis().explained_until == 2


def test_a_rank_that_tells_nothing_is_waited_for_once() -> None:
    now = [0.0]
    analyst = Analyst((0, 1, 2), OneClock(), lambda: now[0])
    assert analyst.take(both(1), is_last=False) == []
    now[0] += LATE_S + 0.1
    assert [s.step for s in analyst.take([], is_last=False)] == [1]
    assert [s.step for s in analyst.take(both(2), is_last=False)] == [2]
    late = Rank(2).tell(2, [(template(ranks=(2,)), 1, 0, 0, 1)])
    assert analyst.take([late], is_last=False) == []
    assert analyst.analysis().left_out == 1
    assert analyst.take(both(3), is_last=False) == [], "it tells again, so it is waited for"


def test_steps_that_a_rank_has_passed_over_are_left_out() -> None:
    analyst = Analyst((0, 1), OneClock())
    told = [both(step)[0] for step in (1, 2, 3, 4)] + [both(step)[1] for step in (2, 4)]
    assert [s.step for s in analyst.take(told, is_last=False)] == [2, 4]
    assert analyst.analysis().left_out == 2


def test_the_end_waits_for_nobody() -> None:
    analyst = Analyst((0, 1), OneClock())
    assert [s.step for s in analyst.take(both(1)[:1], is_last=True)] == [1]


def test_steps_are_explained_on_when_who_is_slow_cannot_be_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StragglerDetector, "add", lambda judge, record: 1 // 0)
    analyst = Analyst((0, 1), OneClock())
    assert [s.step for s in analyst.take(both(1), is_last=False)] == [1]
    assert [s.step for s in analyst.take(both(2), is_last=True)] == [2]
    assert analyst.analysis().verdicts == ()


def test_calls_whose_template_was_lost_are_left_out_and_the_others_matched() -> None:
    analyst = Analyst((0, 1), OneClock())
    other = template(bytes=8)
    rank0, rank1 = Rank(0), Rank(1)
    rank0.tell(0, [(other, 1, 0, 0, 1)])  # never arrives
    told = [
        rank0.tell(1, [(other, 2, 0, 0, 1), (TWO, 3, 1, 1, 9)], [(1, 9)]),
        rank1.tell(1, [(other, 2, 0, 0, 1), (TWO, 3, 6, 6, 9)]),
    ]
    (step,) = analyst.take(told, is_last=False)
    assert step.waiting_ms[0] == close(5)
    assert analyst.analysis().left_out == 1


def test_ranks_that_tell_every_fourth_step_are_explained_there() -> None:
    analyst = Analyst((0, 1), OneClock())
    told = [record for step in (4, 8, 12) for record in both(step)]
    assert [s.step for s in analyst.take(told, is_last=False)] == [4, 8, 12]
    (row,) = analyst.analysis().table
    assert row.count == 1


def test_what_ranks_leave_out_is_counted() -> None:
    analyst = Analyst((0, 1), OneClock())
    analyst.take([Rank(0).tell(1, [], skipped=7), Rank(1).tell(1, [], skipped=5)], is_last=False)
    assert analyst.analysis().left_out == 12


def test_the_share_of_waiting_divides_the_exposed_time_of_all_recent_steps() -> None:
    analyst = Analyst((0, 1), OneClock())
    records = [record for step in (2, 4) for record in both(step, late_ms=4)]
    for step in range(1, 5):
        values = {"step_s": 0.020, "compute_s": 0.010, "comm_s": 0.010, "comm_total_s": 0.010}
        records += [Record(rank, 100 + step, "step", step, 0, values) for rank in (0, 1)]
    analyst.take(records, is_last=True)
    first, second = analyst.analysis().ranks
    assert first.parts["waiting"] == close(4)
    assert first.parts["transfer"] == close(6)
    assert first.waits_for == (1, close(4))
    assert sum(first.parts.values()) == close(first.step_ms) == close(20)
    assert second.waits_for is None


def test_the_table_says_who_comes_last_how_often_and_how_fast_it_goes() -> None:
    analyst = Analyst((0, 1), OneClock())
    records = []
    for step in range(1, 5):
        records += both(step, late_ms=4.0 if step < 4 else -2.0)
    analyst.take(records, is_last=False)
    (row,) = analyst.analysis().table
    assert (row.kind, row.ranks, row.line, row.bytes) == (
        "all_reduce",
        (0, 1),
        "cell 7, line 3",
        4_000_000,
    )
    assert row.count == 1
    assert row.last == (1, 0.75)
    assert row.skew_ms == close((3 * 4 + 2) / 4)
    assert row.waiting_ms == close((3 * 4 + 2) / 4), "of the rank that waited, not of both"
    assert row.transfer_ms == close((3 * 6 + 10) / 4)
    assert row.algbw == close(4e6 / 7e-3)
    assert row.busbw == row.algbw, "of two ranks: 2 (n - 1) / n = 1"


def test_a_message_is_one_row_of_its_sender() -> None:
    analyst = Analyst((0, 1), OneClock())
    told = [
        Rank(0).tell(1, [(template("send", peer=1), 1, 30, 30, 31)], [(30, 31)]),
        Rank(1).tell(1, [(template("recv", peer=0, line=""), 1, 2, 2, 33)], [(2, 33)]),
    ]
    analyst.take(told, is_last=False)
    (row,) = analyst.analysis().table
    assert (row.kind, row.ranks, row.count, row.skew_ms) == ("send", (0, 1), 1, close(28))
    assert row.transfer_ms == close(3)


def test_time_in_a_queue_is_no_transfer() -> None:
    analyst = Analyst((0, 1), OneClock())
    told = [Rank(r).tell(1, [(TWO, 1, 0, 30, 40)], [(0, 40)]) for r in (0, 1)]
    analyst.take(told, is_last=False)
    (row,) = analyst.analysis().table
    assert row.queue_ms == close(30)
    assert row.transfer_ms == close(10)


def test_the_time_line_has_a_lane_a_rank_on_one_clock_over_the_last_steps() -> None:
    analyst = Analyst((0, 1), OneClock())
    records = [record for step in range(1, 9) for record in both(step)]
    records += [
        Record(0, 99, "step", step, 0, {"step_s": 0.020, "compute_s": 0.02}) for step in range(1, 9)
    ]
    analyst.take(records, is_last=False)
    line = analyst.analysis().line
    assert line is not None
    assert [step for step, _, _ in line.steps] == [6, 7, 8]
    assert line.steps[1][1:] == (close(20), close(40))
    assert line.steps[2][1:] == (close(40), close(60))
    assert [len(lane.spans) for lane in line.lanes] == [3, 3]
    first, second = (lane.spans[0] for lane in line.lanes)
    assert (first.launch_ms, first.end_ms, first.arrived_ms) == (close(5), close(15), close(9))
    assert second.launch_ms == close(9)
    assert line.lanes[0].blocked[0] == (close(5), close(15))
    assert analyst.analysis().table[first.row].kind == "all_reduce"


def test_a_step_that_was_left_out_has_no_place_on_the_time_line() -> None:
    analyst = Analyst((0, 1), OneClock())
    told = [record for step in (1, 2, 4) for record in both(step)]
    told += [both(3)[0], Record(0, 99, "step", 3, 0, {"step_s": 0.020, "compute_s": 0.02})]
    told += [Record(0, 9, "step", s, 0, {"step_s": 0.020, "compute_s": 0.02}) for s in (1, 2, 4)]
    assert [step.step for step in analyst.take(told, is_last=False)] == [1, 2, 4]
    line = analyst.analysis().line
    assert line is not None
    assert [step for step, _, _ in line.steps] == [1, 2, 4]


def of_length(step: int) -> Record:
    return Record(0, 9, "step", step, 0, {"step_s": 0.020, "compute_s": 0.02})


def test_a_single_step_is_drawn_alone_as_long_as_its_collectives_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(analyst_module, "MOST_KEPT", 14)
    analyst = Analyst((0, 1), OneClock())
    for step in range(1, 11):
        analyst.take([*both(step), of_length(step)], is_last=False)

    line = analyst.line_of(9)

    assert line is not None
    assert [step for step, _, _ in line.steps] == [9]
    assert [len(lane.spans) for lane in line.lanes] == [1, 1]
    assert line.lanes[1].spans[0].launch_ms == close(9)
    assert line.lanes[0].blocked == ((close(5), close(15)),)
    assert analyst.line_of(1) is None, "14 calls are of the last steps"
    assert analyst.line_of(99) is None


def test_what_is_kept_does_not_grow_with_the_steps() -> None:
    analyst = Analyst((0, 1), OneClock())
    for step in range(1, 40 * RECENT, RECENT):
        records = [record for s in range(step, step + RECENT) for record in both(s)]
        assert len(analyst.take(records, is_last=False)) == RECENT
    kept = vars(analyst)
    assert sum(len(rows) for rows in kept["_rows"]) <= 2 * 3
    assert not kept["_told"]
    assert not kept["_since"]
    assert kept["_size"] == 0
    assert len(kept["_ends"]) == 3
    met = vars(kept["_table"])["_met"]
    assert len(met.step) == RECENT


def test_what_is_kept_does_not_grow_where_nothing_is_explained() -> None:
    analyst = Analyst((0,), OneClock())
    for step in range(1, 2 * MOST_LENGTHS):
        analyst.take(
            [Record(0, 9, "step", step, 0, {"step_s": 0.02, "compute_s": 0.0})], is_last=False
        )
    assert len(vars(analyst)["_lengths_ns"]) == MOST_LENGTHS


def test_a_rank_without_a_clock_is_left_out_and_others_are_told_as_unmatched() -> None:
    class NoClock(OneClock):
        def offset_ns(self, rank: int, moment_ns: int) -> int | None:
            return None if rank == 1 else 0

    analyst = Analyst((0, 1), NoClock())
    (step,) = analyst.take(both(1), is_last=False)
    assert step.skew_ms is None
    assert step.waiting_ms[0] == 0
    assert analyst.analysis().left_out == 1


def test_records_of_calls_without_any_are_no_trouble() -> None:
    analyst = Analyst((0, 1), OneClock())
    nothing = [Rank(r).tell(1, []) for r in (0, 1)]
    assert isinstance(nothing[0].detail, Calls)
    (step,) = analyst.take(nothing, is_last=False)
    assert step.waiting_ms == {0: 0, 1: 0}
    assert analyst.analysis().table == ()


def test_the_first_two_steps_of_a_cell_are_told_apart_at_its_end() -> None:
    analyst = Analyst((0, 1), OneClock())
    steps = [
        Record(rank, step, "step", step, 0, {"step_s": 9.0 if step < 3 else 1.0, "compute_s": 0.5})
        for step in (1, 2, 3, 4)
        for rank in (0, 1)
    ]
    late = [record for step in (1, 2) for record in both(step, 8.0)]
    usual = [record for step in (3, 4) for record in both(step, 4.0)]
    analyst.take([*steps, *late, *usual], is_last=True)
    found = analyst.analysis()
    assert [rank.step_ms for rank in found.ranks] == close([5000, 5000])
    assert [rank.step_ms for rank in found.later_ranks] == close([1000, 1000])
    assert [row.skew_ms for row in found.table] == close([6])
    assert [(row.skew_ms, row.count) for row in found.later_table] == [(close(4), 1)]
