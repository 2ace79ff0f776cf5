"""One cell's insight: a thread that explains steps and is in nobody's way."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from nbdist.client.metrics.analysis.analyst import Analyst
from nbdist.client.metrics.analysis.cell_analysis import CellAnalysis
from nbdist.client.metrics.analysis.clocks import Clocks
from nbdist.client.metrics.analysis.values import PARTS
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.shared import clock
from nbdist.shared.wire import Record

INFO = CellInfo(1, "train()", (0, 1), 2, "gloo", ("cpu", "cpu"))


def step(rank: int, number: int, **seconds: float) -> Record:
    return Record(rank, number, "step", number, 0, seconds)


def clocks() -> Clocks:
    def ask(_: int) -> "Future[dict[str, Any]]":
        answer: Future[dict[str, Any]] = Future()
        answer.set_result(clock.read())
        return answer

    return Clocks(ask)


def begun(thread: str) -> bool:
    return any(t.name == thread for t in threading.enumerate())


def test_a_cell_without_steps_gets_no_thread() -> None:
    insight = CellAnalysis(INFO, clocks())
    insight.receive([Record(0, 0, "log", 0, 0, {"accuracy": 0.9})])
    assert not begun("nbdist-analysis")
    insight.finish(1)
    assert insight.now().ranks == ()


def test_what_came_before_the_end_is_known_after_it_and_the_thread_is_gone() -> None:
    insight = CellAnalysis(INFO, clocks())
    for number in range(1, 200):
        insight.receive([step(0, number, step_s=0.010, compute_s=0.010)])
    insight.finish(20)
    assert [rank.step_ms for rank in insight.now().ranks] == [pytest.approx(10)]
    assert not begun("nbdist-analysis")


def test_the_parts_of_a_step_sum_to_it_and_nobody_is_blamed_before_ranks_were_compared() -> None:
    insight = CellAnalysis(INFO, clocks())
    seconds = {"compute_s": 0.05, "comm_s": 0.02, "data_s": 0.01, "optimizer_s": 0.007}
    insight.receive([step(1, 1, step_s=0.09, comm_total_s=0.05, **seconds)])
    insight.finish(20)
    (rank,) = insight.now().ranks
    assert tuple(rank.parts) == PARTS
    assert sum(rank.parts.values()) == pytest.approx(rank.step_ms)
    assert rank.parts["hidden"] == pytest.approx(30)
    assert rank.parts["compute"] == pytest.approx(20)
    assert rank.parts["transfer"] == pytest.approx(20)
    assert rank.parts["other"] == pytest.approx(3)
    assert rank.waits_for is None


def test_a_step_whose_communication_was_not_measured_has_no_such_part() -> None:
    insight = CellAnalysis(INFO, clocks())
    seconds = {"compute_s": 0.07, "data_s": 0.01, "optimizer_s": 0.007}
    insight.receive([step(1, number, step_s=0.09, **seconds) for number in range(1, 4)])
    insight.finish(20)
    (rank,) = insight.now().ranks
    assert list(rank.parts) == ["compute", "data", "optimizer", "other"]
    assert sum(rank.parts.values()) == pytest.approx(rank.step_ms)


def test_what_computing_hides_of_communication_is_known_of_told_steps_and_stands_for_all() -> None:
    insight = CellAnalysis(INFO, clocks())
    seconds = {"step_s": 0.05, "compute_s": 0.04, "comm_s": 0.01}
    for number in range(1, 51):
        told = {"comm_total_s": 0.02} if number % 8 == 0 else {}
        insight.receive([step(0, number, **seconds, **told)])
    insight.finish(20)
    (rank,) = insight.now().ranks
    assert rank.parts["hidden"] == pytest.approx(10)
    assert rank.parts["compute"] == pytest.approx(30)


def test_only_recent_steps_count() -> None:
    insight = CellAnalysis(INFO, clocks())
    insight.receive([step(0, number, step_s=1.0, compute_s=1.0) for number in range(1, 51)])
    insight.receive([step(0, number, step_s=0.002, compute_s=0.002) for number in range(51, 101)])
    insight.finish(20)
    assert insight.now().ranks[0].step_ms == pytest.approx(2)


def test_a_failure_is_logged_and_the_last_result_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    insight = CellAnalysis(INFO, clocks())
    insight.receive([step(0, 1, step_s=0.01, compute_s=0.01)])
    wait_until(lambda: bool(insight.now().ranks))
    before = insight.now()

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Analyst, "take", fail)
    with caplog.at_level(logging.ERROR, "nbdist.analysis"):
        wait_until(lambda: not begun("nbdist-analysis"))
    assert "analysis of steps stopped" in caplog.text
    insight.receive([step(0, 2, step_s=0.01, compute_s=0.01)])
    insight.finish(1)
    assert insight.now() is before


def wait_until(holds: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(3000):
        if holds():
            return
        event.wait(0.01)
    raise AssertionError("it never came to be")
