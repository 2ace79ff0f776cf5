"""The points of a cell's lines: what travels is what was recorded, once, and bounded."""

import math
from array import array
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from nbdist.client.board.live.explained import ExplainedLines
from nbdist.client.board.live.points import (
    MOST_OWN,
    MOST_POINTS,
    Points,
    PointStream,
    behind_scene,
    of_scene,
)
from nbdist.client.board.scene.look import look
from nbdist.client.board.scene.scene import ALL
from nbdist.client.metrics.analysis.values import ExplainedStep
from nbdist.client.metrics.detail import NOT_KEPT, Detail
from nbdist.client.metrics.telemetry import MAX_POINTS, Telemetry
from nbdist.shared.wire import Batch, Record
from tests.unit.client.board.board_data import cell_info, devices_of, steps_of, training

Lines = Mapping[tuple[str, int], list[tuple[float, float]]]


def lines_of(points: Points | None) -> Lines:
    """Return what a page reads: points by line and rank."""
    assert points is not None
    numbers = np.frombuffer(points.data, np.float32)
    lines, at = {}, 0
    for name, rank, _, _, _, count in points.headers:
        x, y = numbers[at : at + count], numbers[at + count : at + 2 * count]
        lines[name, rank] = list(zip(x.tolist(), y.tolist(), strict=True))
        at += 2 * count
    assert at == len(numbers), "all bytes belong to a line"
    return lines


def test_a_page_reads_what_the_ranks_have_recorded() -> None:
    telemetry = training(2, 30)

    lines = lines_of(PointStream(telemetry).take())

    steps = telemetry.series("step_s")[1]
    assert [x for x, _ in lines["step", 1]] == list(steps.steps)
    assert [y for _, y in lines["step", 1]] == pytest.approx([1e3 * s for s in steps.values])
    assert {name for name, _ in lines} == {
        *("loss", "step", "part.compute", "part.communication", "part.data"),
    }


def test_each_point_travels_once() -> None:
    telemetry = training(2, 30)
    stream = PointStream(telemetry)
    stream.take()
    assert stream.take() is None

    telemetry.receive(steps_of(1, 2, 5, first=31))

    lines = lines_of(stream.take())
    assert {rank for _, rank in lines} == {1}
    assert [x for x, _ in lines["loss", 1]] == [31, 32, 33, 34, 35]


def test_a_history_that_was_rewritten_travels_again_and_says_so() -> None:
    telemetry = Telemetry()
    records = [Record(0, seq, "log", seq + 1, 0, {"f1": float(seq)}) for seq in range(4)]
    stream = PointStream(telemetry)
    telemetry.receive(Batch(0, (records[0],)))
    telemetry.receive(Batch(0, (records[2], records[3])))
    before = stream.take()
    assert before is not None

    telemetry.receive(Batch(0, (records[1],)))  # a gap is filled

    after = stream.take()
    assert [y for _, y in lines_of(after)["own.f1", 0]] == [0, 1, 2, 3]
    assert after is not None
    assert before.headers[0][2] != after.headers[0][2]


def test_what_a_page_that_opens_gets_stays_small_however_long_the_run_and_has_its_spikes() -> None:
    telemetry = Telemetry()
    losses = [1.0] * (MAX_POINTS // 2)
    losses[4321] = 77.0
    losses[1234] = math.nan
    telemetry.receive(
        Batch(0, tuple(Record(0, i, "step", i + 1, 0, {"loss": v}) for i, v in enumerate(losses)))
    )

    points = PointStream(telemetry).whole()

    ((_, _, _, first, until, count),) = points.headers
    assert (first, until) == (0, len(losses))
    assert count <= MOST_POINTS
    assert len(points.data) == 8 * count
    assert (4322, 77) in lines_of(points)["loss", 0]


def test_a_range_is_told_with_all_its_points() -> None:
    telemetry = training(1, 9000)

    lines = lines_of(PointStream(telemetry).between(100, 199.5))

    assert [x for x, _ in lines["loss", 0]] == list(range(100, 200))


def long_training(steps: int, detail: Detail | None) -> tuple[Telemetry, "npt.NDArray[np.float64]"]:
    """Return the telemetry of one rank, and its losses."""
    losses, telemetry = np.random.default_rng(0).normal(size=steps), Telemetry(detail=detail)
    for at in range(0, steps, 1000):
        rows = enumerate(losses[at : at + 1000].tolist(), start=at)
        telemetry.receive(
            Batch(0, tuple(Record(0, i, "step", i + 1, 0, {"loss": loss}) for i, loss in rows))
        )
    return telemetry, losses


def test_a_range_of_a_long_run_has_the_points_that_its_history_has_lost(tmp_path: Path) -> None:
    telemetry, losses = long_training(100_000, Detail(tmp_path))
    kept = telemetry.series("loss")[0]
    assert kept.n <= MAX_POINTS

    points = PointStream(telemetry).between(40_000, 41_999)

    assert points.lost == ""
    steps, values = zip(*lines_of(points)["loss", 0], strict=True)
    assert steps == tuple(range(40_000, 42_000))
    assert np.array_equal(values, losses[39_999:41_999].astype(np.float32))
    assert len(set(steps) & set(kept.steps)) < 600


def test_a_range_of_any_length_travels_in_as_few_points(tmp_path: Path) -> None:
    telemetry, losses = long_training(100_000, Detail(tmp_path))
    for until in (6000, 30_000, 100_000):
        points = PointStream(telemetry).between(1, until)
        ((_, _, _, first, last, count),) = points.headers
        assert count <= MOST_POINTS
        assert count < last - first, "a page says that it is thinned"
        values = [y for _, y in lines_of(points)["loss", 0]]
        assert max(values) == np.float32(losses[:until].max())


def test_a_range_that_is_not_kept_has_what_there_is_and_says_so() -> None:
    telemetry, _ = long_training(35_000, None)
    points = PointStream(telemetry).between(100, 2000)
    assert points.lost == NOT_KEPT
    assert 0 < len(lines_of(points)["loss", 0]) < 1901
    assert PointStream(telemetry).between(34_000, 35_000).lost == ""


def test_lines_without_steps_or_without_points_in_a_range_are_left_as_they_are() -> None:
    telemetry = training(1, 300)
    telemetry.receive(
        Batch(0, tuple(Record(0, 1000 + i, "log", 0, 0, {"f": 1.0}) for i in range(300)))
    )
    assert lines_of(PointStream(telemetry).between(400, 500)) == {}
    assert {name for name, _ in lines_of(PointStream(telemetry).between(0, 500))} == {
        *("loss", "step", "part.compute", "part.communication", "part.data"),
    }


def test_a_board_after_the_cell_finds_its_lines_in_the_records(tmp_path: Path) -> None:
    telemetry, _ = long_training(50_000, Detail(tmp_path))
    telemetry.receive(steps_of(1, 2, 300))
    scene = look(telemetry, cell_info(2))

    names = {name for name, *_ in of_scene(scene).headers}
    finer = behind_scene(telemetry).between(100, 200)

    lines = lines_of(finer)
    assert {name for name, _ in lines} == {"loss", "step", "comm"} <= names
    assert len(lines["loss", 0]) == 101
    thinned = {(name, rank): until > count for name, rank, _, _, until, count
               in of_scene(scene).headers}  # fmt: skip
    assert thinned["loss", 0]
    assert not thinned["loss", 1]


def test_seconds_of_devices_begin_with_the_first() -> None:
    telemetry = training(1, 3)
    telemetry.receive(devices_of(0, 4, gpu=False))

    lines = lines_of(PointStream(telemetry).take())

    assert [x for x, _ in lines["device.cpu_pct", 0]] == [0, 1, 2, 3]
    assert lines["device.resident_bytes", 0][0][1] == pytest.approx(6e8)


def test_the_users_numbers_are_bounded_and_named_apart_from_ours() -> None:
    telemetry = Telemetry()
    own = {f"metric_{i:02}": 1.0 for i in range(40)} | {"loss": 3.0}
    telemetry.receive(Batch(0, (Record(0, 0, "log", 1, 0, own),)))

    lines = lines_of(PointStream(telemetry).take())

    names = {name for name, _ in lines}
    assert len([name for name in names if name.startswith("own.")]) == MOST_OWN
    assert "log.loss" in names


def test_what_was_found_of_single_steps_is_lines_too() -> None:
    explained = ExplainedLines()
    explained.add([ExplainedStep(7, {0: 4.0, 1: 0.0}, {0: 1.0, 1: 1.0}, 4.0, last=1)])
    explained.add([ExplainedStep(9, {0: 2.0, 1: 0.5}, {0: 1.0, 1: 1.0}, None, last=None)])

    lines = lines_of(PointStream(Telemetry(), explained).take())

    assert lines["part.waiting", 0] == [(7, 4), (9, 2)]
    assert lines["part.transfer", 1] == [(7, 1), (9, 1)]
    assert lines["last", ALL] == [(7, 1)]


def test_a_board_that_was_kept_has_the_same_lines() -> None:
    telemetry = training(2, 50)
    scene = look(telemetry, cell_info(2))

    kept, live = lines_of(of_scene(scene)), lines_of(PointStream(telemetry).take())

    for name in ("loss", "step"):
        assert np.allclose(kept[name, 1], live[name, 1])
    assert np.allclose(kept["comm", 0], live["part.communication", 0])
    assert sum(y for _, y in kept["part.compute", 0]) == pytest.approx(
        sum(y for _, y in live["part.compute", 0]), rel=1e-3
    )


def test_numbers_too_large_for_a_page_are_infinite_there_and_end_nothing() -> None:
    telemetry = Telemetry()
    values = array("d", [1e300, 2.0])
    telemetry.receive(
        Batch(0, tuple(Record(0, i, "log", i + 1, 0, {"f": v}) for i, v in enumerate(values)))
    )

    assert lines_of(PointStream(telemetry).take())["own.f", 0] == [(1, math.inf), (2, 2)]
