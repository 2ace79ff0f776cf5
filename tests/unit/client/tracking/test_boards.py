"""Which run a word means, and why a run has no board."""

import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbdist.client.metrics.telemetry import CellInfo, Telemetry
from nbdist.client.tracking.begin import RunPlace, attached_run
from nbdist.client.tracking.past.runs import find_run, kept_board, runs_table, select
from nbdist.client.tracking.spool import SpooledRun, spool_of, spooled_runs
from nbdist.client.tracking.study import Study
from nbdist.client.tracking.writing import RunEnd, RunWriter
from nbdist.shared.errors import TrackingError, UsageError
from nbdist.shared.wire import PUBLISHED


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs of the notebook "nb": "careful" twice, a sweep and its run; one of another."""
    add(tmp_path, 1, "careful", board=b"old")
    add(tmp_path, 2, "careful", board=b"new")
    add(tmp_path, 3, "lr", kind="study")
    add(tmp_path, 4, "lr=0.1", study="00000000000000000003-1-1", steps=0)
    add(tmp_path, 5, "other", experiment="another")
    return tmp_path


def add(folder: Path, number: int, name: str, board: bytes | None = None, **more: Any) -> None:
    run = spool_of(folder) / f"{number:020d}-1-1"
    run.mkdir(parents=True)
    summary = {
        "name": name, "experiment": "nb", "uri": "sqlite:///x", "status": "finished", "cell": 1,
        "started_ms": 0, "updated_ms": 1, "world_size": 2, "layout": "", "steps": 5, "values": {},
        "params": {}, "user_keys": [],
    } | more  # fmt: skip
    (run / "summary.json").write_text(json.dumps(summary))
    if board is not None:
        (run / "board.json.gz").write_bytes(board)


def test_a_name_means_the_newest_run_so_called_and_a_number_any(folder: Path) -> None:
    assert kept_board(folder, "nb", find_run(folder, "nb", "careful")) == b"new"
    assert kept_board(folder, "nb", find_run(folder, "nb", "4")) == b"old"


def test_a_name_that_is_a_number_comes_first(folder: Path) -> None:
    add(folder, 6, "4", board=b"four")
    assert kept_board(folder, "nb", find_run(folder, "nb", "4")) == b"four"


def test_an_unknown_word_is_one_line_that_names_the_newest_runs(folder: Path) -> None:
    with pytest.raises(UsageError) as unknown:
        find_run(folder, "nb", "carefull", ["overview", "step"])
    assert str(unknown.value) == (
        "No run or view is called 'carefull'; did you mean careful? "
        "The newest runs: lr, lr=0.1, careful."
    )
    with pytest.raises(UsageError, match=r"called 'stp'; did you mean step\?"):
        find_run(folder, "nb", "stp", ["overview", "step"])
    with pytest.raises(UsageError, match=r"No run is called '7'\. The newest runs: lr"):
        find_run(folder, "nb", "7")
    with pytest.raises(UsageError, match=r"No run is called 'x'\. No runs yet\."):
        find_run(folder, "a new notebook", "x")


def test_a_run_without_a_board_says_why(folder: Path) -> None:
    add(folder, 6, "old")
    add(folder, 7, "dead", status="running")  # and nobody holds its lock
    why = {
        "old": "it was too large to keep, or made before boards were kept",
        "dead": "its kernel ended before its cell did",
        "lr=0.1": "its cell made no step and logged nothing",
        "lr": "it is a sweep",
    }
    for name, reason in why.items():
        with pytest.raises(TrackingError, match=f"Run {name} has no board") as missing:
            kept_board(folder, "nb", find_run(folder, "nb", name))
        assert reason in missing.value.why
        assert missing.value.do
    assert missing.value.do == "name one of them: lr=0.1"


def test_a_board_that_cannot_be_kept_costs_the_run_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = RunPlace(tmp_path / ".nbdist", "sqlite:///x", "nb")
    info = CellInfo(5, "train()", (0,), 1, "gloo", ("cpu",), run_name="one")
    writer = RunWriter(place, info, [info], Telemetry(), 10**9)
    folder = spool_of(place.folder) / writer.begin.key
    (folder / "board.json.gz").mkdir()  # nothing can be put in its place

    writer.end(RunEnd("finished", None, None, 2 * 10**9, board=b"board"))
    writer.close()

    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert "board of run one was not kept" in caplog.text


def test_a_run_whose_kernel_is_killed_as_it_begins_is_continued_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RunPlace(tmp_path / ".nbdist", "sqlite:///x", "nb")
    info = CellInfo(5, "train()", (0,), 1, "gloo", ("cpu",), run_name="one")
    rename = os.rename

    def rename_and_die(old: Path, new: Path) -> None:
        rename(old, new)
        raise SystemExit

    monkeypatch.setattr(os, "rename", rename_and_die)
    with pytest.raises(SystemExit):
        RunWriter(place, info, [info], Telemetry(), 10**9)
    monkeypatch.undo()

    begun = attached_run(place.folder, 5, [os.getpid()], 0)
    attached = replace(info, continues=begun, attached=True)
    writer = RunWriter(place, attached, [attached], Telemetry(), 10**9)
    writer.close()
    assert begun is not None
    assert writer.begin.continues == begun


def attached_to(place: RunPlace, info: CellInfo) -> CellInfo:
    """Return the cell `info` of this process as another kernel goes on with it."""
    begun = attached_run(place.folder, info.number, [os.getpid()], 0)
    assert begun is not None
    return replace(info, continues=begun, attached=True)


def killed_while_open(writer: RunWriter) -> SpooledRun:
    """Let go of a run as a kernel does that is killed: what is buffered is not written."""
    os.close(writer._spool._ops.fileno())
    with contextlib.suppress(OSError):
        writer.close()
    return SpooledRun(writer._spool.folder)


def ops_of(run: SpooledRun) -> list[Any]:
    return [json.loads(line) for line in run.ops.read_text().splitlines()]


def test_a_run_has_its_story_from_the_first_kernel_that_lived_to_write_it(tmp_path: Path) -> None:
    place = RunPlace(tmp_path / ".nbdist", "sqlite:///x", "nb")
    info = CellInfo(5, "train()", (0,), 1, "gloo", ("cpu",), run_name="one", params={"lr": 0.1})
    kinds = []
    for lives_on in (False, True, True):
        writer = RunWriter(place, info, [info], Telemetry(), 10**9)
        if lives_on:
            writer.write_story()
        run = killed_while_open(writer)
        kinds.append({op["op"] for op in ops_of(run)})
        run.drop_content()  # it was sent meanwhile
        info = attached_to(place, info)
    assert kinds == [{"begin"}, {"begin", "params", "tags", "file"}, {"begin"}]


@pytest.fixture
def dies_at_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is killed while it waits for the disk."""

    def die(_descriptor: int) -> None:
        raise SystemExit

    monkeypatch.setattr(os, "fsync", die)


@pytest.mark.usefixtures("dies_at_the_disk")
def test_a_run_whose_kernel_is_killed_at_its_end_is_not_told_as_finished(tmp_path: Path) -> None:
    place = RunPlace(tmp_path / ".nbdist", "sqlite:///x", "nb")
    info = CellInfo(5, "train()", (0,), 1, "gloo", ("cpu",), run_name="one")
    writer = RunWriter(place, info, [info], Telemetry(), 10**9)
    with pytest.raises(SystemExit):
        writer.end(RunEnd("finished", None, None, 2 * 10**9))
    writer.close()
    (run,) = spooled_runs(place.folder)
    assert run.summary()["status"] == "running"


@pytest.mark.usefixtures("dies_at_the_disk")
def test_a_study_whose_kernel_is_killed_at_its_end_is_not_told_as_finished(tmp_path: Path) -> None:
    place = RunPlace(tmp_path / ".nbdist", "sqlite:///x", "nb")
    info = CellInfo(5, "train()", (0,), 1, "gloo", ("cpu",), run_name="one")
    study = Study(place, "tried", "train()", {"lr": [1, 2]})
    study.begin(info, 10**9)
    with pytest.raises(SystemExit):
        study._finish("finished", None, (), "")
    (run,) = spooled_runs(place.folder)
    assert run.summary()["status"] == "running"


@pytest.mark.parametrize("moves", [False, True])
def test_a_model_is_in_one_run_though_a_kernel_was_killed_as_it_took_it(
    moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RunPlace(tmp_path / ".nbdist", "sqlite:///x", "nb")
    info = CellInfo(5, "train()", (0,), 1, "gloo", ("cpu",), run_name="one")
    model = tmp_path / "models" / "small-1"
    model.mkdir(parents=True)
    telemetry = Telemetry()
    told = {"folder": str(model), "name": "small", "alias": ""}
    telemetry.facts[0] = {PUBLISHED: json.dumps([told])}
    move = shutil.move

    def die(old: Path, new: Path) -> None:
        if moves:
            move(old, new)
        raise SystemExit

    writer = RunWriter(place, info, [info], telemetry, 10**9)
    monkeypatch.setattr(shutil, "move", die)
    with pytest.raises(SystemExit):
        writer.tick()
    monkeypatch.undo()
    first = killed_while_open(writer)
    writer = RunWriter(place, attached_to(place, info), [info], telemetry, 10**9)
    writer.tick()
    writer.close()

    def has_model(run: SpooledRun) -> bool:
        is_told = any(op["op"] == "model" for op in ops_of(run))
        return is_told and (run.folder / "files" / "models" / "small-1").is_dir()

    second = SpooledRun(writer._spool.folder)
    assert (has_model(first), has_model(second)) == (moves, not moves)
    assert "model_lost" not in second.ops.read_text()


def test_runs_that_the_table_has_no_room_for_are_counted_and_known_by_name(tmp_path: Path) -> None:
    for number in range(1, 26):
        add(tmp_path, number, f"run{number}")
    table = runs_table(tmp_path, "nb")
    assert (len(table.rows), table.older) == (20, 5)
    assert "There are 5 older runs; %dist runs NAME" in str(table)
    assert [row.name for row in select(tmp_path, "nb", ["run3", "1"])] == ["run3", "run25"]
    with pytest.raises(UsageError, match=r"No run is called '21'"):
        select(tmp_path, "nb", ["21"])


def test_a_sweeps_name_stands_for_all_its_runs(folder: Path) -> None:
    add(folder, 6, "lr=0.2", study="00000000000000000003-1-1")
    chosen = select(folder, "nb", ["lr=0.2", "lr"])
    assert [row.name for row in chosen] == ["lr=0.2", "lr=0.1"]
