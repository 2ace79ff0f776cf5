"""The usual step of a training, from records as ranks tell them."""

from array import array

import pytest

from nbdist.client.metrics.telemetry import CellInfo, Telemetry
from nbdist.client.metrics.usual_step import UNTOLD, UsualSteps, step_time
from nbdist.shared.packed import Calls, Template
from nbdist.shared.wire import Batch, Record

INFO = CellInfo(1, "", (0, 1), 2, "gloo", ("cpu", "cpu"))
TEMPLATES = {
    0: Template("all_reduce", "0", "the default group", (0, 1), 1000, "float32", ""),
    1: Template("broadcast", "0", "the default group", (0, 1), 80, "int64", ""),
}


def step(rank: int, number: int, collectives: float, nbytes: float, **more: float) -> Record:
    values = {"collectives": collectives, "bytes": nbytes, **more}
    return Record(rank, number * 2 + 1, "step", number, 0, values)


def calls(rank: int, number: int, *templates: int) -> Record:
    rows = array("I", [n for template in templates for n in (template, 1, 0, 1, 2, 0)])
    told = Calls(0, TEMPLATES if number == 1 else {}, rows, array("I"))
    return Record(rank, number * 2, "calls", number, 0, {}, told)


def ten_steps(rank: int) -> list[Record]:
    records = [calls(rank, 1, 1, 0), step(rank, 1, 2, 1080)]
    for number in range(2, 11):
        kinds, sent = ((0, 1), 1080.0) if number == 2 else ((0,), 1000.0)
        records += [calls(rank, number, *kinds), step(rank, number, len(kinds), sent)]
    return records


def test_the_usual_step_is_the_most_frequent_and_the_rest_is_counted() -> None:
    steps = UsualSteps(INFO)
    for rank in (0, 1):
        steps.receive(ten_steps(rank))
    figures = steps.figures(Telemetry())
    assert figures is not None
    assert figures.kinds == ({"all_reduce": 1}, {"all_reduce": 1})
    assert figures.bytes == pytest.approx(1000)  # 2 (n - 1) / n of what a rank puts in
    assert figures.in_all == (10, 10)
    assert (figures.world_size, figures.steps) == (2, 10)


def test_kinds_are_known_also_where_a_step_is_told_after_its_record() -> None:
    steps = UsualSteps(INFO)
    steps.receive([calls(0, 1, 0), step(0, 1, 1, 1000), step(0, 2, 1, 1000), step(0, 3, 1, 1000)])
    steps.receive([calls(0, 2, 0)])
    figures = steps.figures(Telemetry())
    assert figures is not None
    assert figures.kinds == ({"all_reduce": 1},)


def test_a_step_of_which_not_all_is_told_teaches_no_kinds() -> None:
    steps = UsualSteps(INFO)
    steps.receive([calls(0, 1, 0), step(0, 1, 1, 1000), calls(0, 2, 0), step(0, 2, 3, 1000)])
    figures = steps.figures(Telemetry())
    assert figures is not None
    assert figures.kinds == ({UNTOLD: 3},)
    assert figures.bytes is None


def test_steps_without_collectives_send_nothing_and_no_steps_have_no_figures() -> None:
    steps = UsualSteps(INFO)
    assert steps.figures(Telemetry()) is None
    steps.receive([step(0, 1, 0, 0), step(0, 2, 0, 0), step(1, 1, 0, 0), step(1, 2, 0, 0)])
    figures = steps.figures(Telemetry())
    assert figures is not None
    assert figures.kinds == ({}, {})
    assert figures.bytes == 0


def test_what_ranks_wait_for_a_core_is_no_part_of_a_steps_time() -> None:
    telemetry = Telemetry()
    for rank in (0, 1):
        rows = []
        for number in range(1, 41):
            # Every fourth step waits 20 ms for a core, each time on the other rank.
            values = {"step_s": 0.03 if number % 4 == 0 else 0.01, "starved_s": 0.0}
            if number % 8 == 4 * rank:
                values["starved_s"] = 0.02
            rows.append(Record(rank, number, "step", number, 0, values))
        telemetry.receive(Batch(rank, tuple(rows)))
    time = step_time(telemetry)
    assert time is not None
    assert time.steps == 39
    assert time.ms == pytest.approx(10)
    assert time.noise == pytest.approx(0)
    assert time.starved == pytest.approx(10 * 0.02 / (10 * 0.03 + 29 * 0.01))
    assert step_time(Telemetry()) is None


def test_a_step_in_which_one_rank_waits_and_another_is_ahead_has_a_time() -> None:
    """Of 5 ms a rank waits 3 for a core, by turns; the other one was ahead, and needs its 2."""
    telemetry = Telemetry()
    for rank in (0, 1):
        rows = []
        for number in range(1, 41):
            waits = number % 2 == rank
            values = {"step_s": 0.005, "starved_s": 0.003} if waits else {"step_s": 0.002}
            rows.append(Record(rank, number, "step", number, 0, {"starved_s": 0.0} | values))
        telemetry.receive(Batch(rank, tuple(rows)))
    time = step_time(telemetry)
    assert time is not None
    assert (time.steps, time.ms) == (39, pytest.approx(2))
