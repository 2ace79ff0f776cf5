"""The table of docs/benchmarks.md is what the stored figures give, and means what it says."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from tests.benchmarks import figures
from tests.benchmarks.__main__ import GROUPS, choose
from tests.benchmarks.bench_step import GPU_CASES, gpu_compared
from tests.benchmarks.figures import Figures, Group, Machine
from tests.benchmarks.table import Row, apart, render

CELL = Row("no-op cell", 8.0, "ms", 6.4, "bare", 0.04, 1.05)
STEP = Row("added", 90.0, "us", 9000.0, "bare", 0.002, 0.02, is_share=True)
MACHINE = Machine("AMD EPYC", 2, "2.13.0", "3.11.7")


def words(*rows: Row) -> list[str]:
    """Return the cells of one figure over these machines."""
    return [cell.strip() for cell in render([rows]).splitlines()[2].strip("|").split("|")]


def group(*rows: Row, date: str = "2026-11-23", note: str = "") -> Group:
    return Group(date, note, rows)


def test_the_table_of_the_docs_is_what_the_stored_figures_give() -> None:
    page = figures.PAGE.read_text()

    assert page == figures.filled(page, figures.table(figures.load(), list(GROUPS)))


def test_every_stored_file_has_the_name_of_its_machine_and_known_groups() -> None:
    for path in figures.FOLDER.iterdir():
        stored = figures.read(path)
        assert path.name == stored.machine.file_name
        assert stored.groups.keys() <= GROUPS.keys()


def test_one_machine_has_figures_and_several_have_ranges() -> None:
    other = dataclasses.replace(CELL, measured=9.6, noise=0.01)

    assert words(CELL)[:4] == ["no-op cell", "8.00 ms", "6.40 ms bare", "1.25 x"]
    assert words(CELL)[4:] == ["4.0 %", "1.05 x", "short"]
    assert words(other, CELL)[1:5] == ["8.00 to 9.60 ms", "6.40 ms bare", "1.25 to 1.50 x", "4.0 %"]


def test_what_is_added_is_read_in_per_cent() -> None:
    assert words(STEP)[3:] == ["1.00 %", "0.2 %", "2 %", ""]


@pytest.mark.parametrize(
    ("goal", "goal_on", "reached"),
    [
        (0.01, "ratio", True),
        (0.009, "ratio", False),
        (90.0, "measured", True),
        (89.0, "measured", False),
        (None, "ratio", True),
    ],
)
def test_a_goal_bounds_the_ratio_or_what_was_measured(
    goal: float | None, goal_on: Literal["ratio", "measured"], reached: bool
) -> None:
    row = dataclasses.replace(STEP, goal=goal, goal_on=goal_on)

    assert row.reached is reached


def test_a_goal_for_a_ratio_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="no reference"):
        Row("start", 3.0, "s", goal=2.0)


def test_one_machine_that_falls_short_is_named_short() -> None:
    slow = dataclasses.replace(STEP, measured=900.0)

    assert words(slow, STEP)[-1] == "short"
    assert render([[slow, STEP], [CELL]]).endswith("Falls short: added; no-op cell.")
    assert render([[STEP]]).endswith("Every goal is reached.")


def test_noise_is_the_difference_of_a_thing_to_itself() -> None:
    assert apart([1.0, 1.1, 9.0], [1.0, 1.0, 1.0]) == pytest.approx(0.1)
    assert apart([1.0], [2.0]) == 0.5


def test_a_run_replaces_what_it_measured_and_keeps_the_rest(tmp_path: Path) -> None:
    figures.save(MACHINE, {"cells": group(CELL), "peers": group(CELL)}, tmp_path)
    path = figures.save(MACHINE, {"cells": group(STEP), "peers": group()}, tmp_path)

    (stored,) = figures.load(tmp_path)
    assert path.name == "amd-epyc-2-cores-torch-2.13.json"
    assert stored == Figures(MACHINE, {"cells": group(STEP), "peers": group(CELL)})


def test_the_page_names_machines_with_days_and_drops_rows_that_are_gone() -> None:
    gone = dataclasses.replace(CELL, what="gone")
    older = Figures(
        dataclasses.replace(MACHINE, cpu="Intel Xeon"),
        {"cells": group(CELL, gone, date="2026-11-21", note="others at work")},
    )
    newer = Figures(MACHINE, {"cells": group(CELL), "step": group(STEP)})

    text = figures.table([older, newer], ["step", "cells"])

    assert text.splitlines()[:2] == [
        "- Intel Xeon, 2 cores, torch 2.13.0, Python 3.11.7: cells on 2026-11-21 (others at work)",
        "- AMD EPYC, 2 cores, torch 2.13.0, Python 3.11.7: cells, step on 2026-11-23",
    ]
    assert text.index("| added") < text.index("| no-op cell")
    assert "gone" not in text


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no longer written"):
        figures.filled(f"text\n{figures.BEGIN}\n", "table")


def test_a_machine_with_a_gpu_has_a_file_and_a_line_of_its_own() -> None:
    with_gpu = dataclasses.replace(MACHINE, gpu="1 x NVIDIA H200")

    assert MACHINE.file_name == "amd-epyc-2-cores-torch-2.13.json"
    assert with_gpu.file_name == "amd-epyc-2-cores-1-x-nvidia-h200-torch-2.13.json"
    assert str(with_gpu) == "AMD EPYC, 2 cores, 1 x NVIDIA H200, torch 2.13.0, Python 3.11.7"


def test_steps_on_a_gpu_are_a_group_of_their_own_that_is_asked_for() -> None:
    assert choose(["step"], "cuda", lambda: 1) == choose([], "cuda", lambda: 1) == ["step-cuda"]
    assert choose(["step"], "cpu", lambda: 1) == ["step"]
    assert "step-cuda" not in choose([], "cpu", lambda: 1)


@pytest.mark.parametrize(
    ("words", "device", "said"),
    [
        (["steps"], "cpu", "there is no group 'steps'"),
        (["cells"], "cuda", "--device cuda is for step, not for cells"),
        (["step"], "cuda", "--device cuda needs an NVIDIA GPU, and torch finds none"),
        (["step-cuda"], "cpu", "--device cuda needs an NVIDIA GPU, and torch finds none"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    words: list[str], device: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        choose(words, device, lambda: 0)


def test_a_step_on_a_gpu_is_charged_without_what_its_collectives_cost() -> None:
    # us: a step by the clock, on the host; a collective; how many a step.
    bare, watched, other = [9000.0, 2000.0, 10, 3], [9100.0, 2150.0, 40, 3], [9200.0, 2020.0, 12, 3]
    host, collective, wall, noise = gpu_compared(GPU_CASES[0], 1, [(bare, watched, other)])

    assert host.what.endswith("host time beside 3 collectives")
    assert (host.measured, host.reference) == (2150 - 2010 - 3 * (40 - 11), 2010)
    assert (collective.measured, collective.reference) == (40 - 11, 11)
    assert host.reached
    assert not dataclasses.replace(host, measured=101.0).reached
    assert collective.reached
    assert (wall.ratio, noise.ratio) == (9100 / 9100, 9200 / 9100)


def test_a_step_that_the_gpu_bounds_may_take_longer_by_the_noise_alone() -> None:
    (bound,) = [case for case in GPU_CASES if case.gpu_bound]
    bare, other = [9000.0, 2000.0, 10, 3], [9180.0, 2020.0, 12, 3]

    def reached(wall: float) -> bool:
        return gpu_compared(bound, 1, [(bare, [wall, 2150.0, 40, 3], other)])[2].reached

    assert reached(9200.0)
    assert not reached(9300.0)
