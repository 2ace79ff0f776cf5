"""MLflow's database comes into being whole, also when its maker is killed.

What befalls it later is told as what it is, and costs no run that MLflow has not had whole.
"""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from nbdist.client.tracking.folder import try_lock
from nbdist.client.tracking.past.runs import runs, runs_table
from nbdist.client.tracking.run import TrackedRun, Tracker
from nbdist.client.tracking.settings import own_database
from nbdist.client.tracking.shipping import database, ship
from nbdist.client.tracking.shipping.shipper import sync
from nbdist.client.tracking.spool import Begin, SpooledRun, SpoolState, SpoolWriter
from tests.tracking.conftest import Ranks, cell, client_of
from tests.tracking.test_embedded import wait_for

_COMMAND = [sys.executable, "-m", "nbdist.client.tracking.shipping.ship"]


def test_a_run_that_another_process_sends_is_said_to_be_just_that(home: Path) -> None:
    begin = Begin(f"{1:020d}-1-1", own_database(home), "nb", "a", 1)
    writer = SpoolWriter(home / "spool", begin, {})
    writer.end("FINISHED", 2)
    writer.close()
    with try_lock(writer.folder / "ship.lock") as mine:
        assert mine
        assert sync(home, 60) == (
            "Kept in .nbdist/spool: 1 run, because another process is sending it. "
            "%dist runs --sync tries again."
        )


@pytest.mark.slow
def test_a_maker_that_is_killed_leaves_a_folder_where_the_next_one_succeeds(
    tmp_path: Path,
) -> None:
    first = subprocess.Popen(
        [*_COMMAND, str(tmp_path), "--drain", "--prepare"], stderr=subprocess.DEVNULL
    )
    unfinished = tmp_path / "mlflow.db.new"
    deadline = time.monotonic() + 60
    while not unfinished.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(30)
    assert unfinished.exists()
    assert not (tmp_path / "mlflow.db").exists()

    # In a process of its own, whose priority it lowers.
    subprocess.run([*_COMMAND, str(tmp_path), "--drain", "--prepare"], check=True, timeout=60)

    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("SELECT COUNT(*) FROM experiments").fetchone() == (1,)
    assert not unfinished.exists()


def test_runs_of_a_deleted_database_are_told_as_lost_though_its_next_maker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = own_database(tmp_path)
    begin = Begin(f"{1:020d}-1-1", uri, "nb", "older", 1)
    SpoolWriter(tmp_path / "spool", begin, {"uri": uri}).close()
    run = SpooledRun(tmp_path / "spool" / begin.key)
    run.save(SpoolState(run_id="sent to the deleted one", is_done=True))
    replace = os.replace

    def replace_and_die(draft: Path, path: Path) -> None:
        replace(draft, path)
        if path == tmp_path / "mlflow.db":
            raise SystemExit

    monkeypatch.setattr(os, "replace", replace_and_die)
    monkeypatch.setattr(ship, "_connect", lambda uri: database.path_of(uri).touch())  # type: ignore[union-attr]
    with pytest.raises(SystemExit):
        ship.Shipper(tmp_path, 0).prepare()
    assert (tmp_path / "mlflow.db").exists()
    assert run.state().is_lost


# What befalls it


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock, as another program would."""
    code = (
        "import sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None); db.execute('BEGIN EXCLUSIVE')\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    yield
    other.communicate()


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Put something else into the file, and move it away afterwards, as it is told."""
    path.write_bytes(b"no database at all " * 1000)
    yield
    path.rename(path.with_suffix(".damaged"))


@contextmanager
def not_writable(path: Path) -> Iterator[None]:
    """Stand for a mount that is read-only; a root user writes into what only has no such bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda place, _mode: str(place) != str(path))
        yield


LOCKED = "another program holds the database locked"
DAMAGED = "the file is damaged: move it away, and a new one is created"

Blow = Callable[[Path], AbstractContextManager[None]]


@pytest.mark.parametrize(
    ("blow", "said"),
    [(locked, LOCKED), (damaged, DAMAGED), (not_writable, "the database is read-only")],
)
def test_what_is_wrong_with_a_file_is_said_in_our_words(blow: Blow, said: str, home: Path) -> None:
    uri = f"sqlite:///{home}/mlflow.db"
    assert database.trouble(uri) == ""
    with blow(home / "mlflow.db"):
        assert database.trouble(uri) == said
    assert database.trouble(uri) == ""
    assert database.trouble("sqlite:////nonexistent/mlflow.db") == ""  # it would be made
    assert database.trouble("https://mlflow.example.org") == ""


def begun(home: Path, name: str) -> tuple[Tracker, Ranks, TrackedRun]:
    """Return a run of which MLflow has something already."""
    tracker, ranks = Tracker(home, None, "troubled"), Ranks(2)
    run = tracker.follow(cell(run_name=name), ranks.telemetry)
    ranks.step(20)
    wait_for(lambda: bool(runs(home)) and bool(runs(home)[0].run_id), 60)
    return tracker, ranks, run


def losses(home: Path, name: str) -> list[float]:
    """Return the losses of the one run of that name that MLflow has."""
    client = client_of(home)
    experiment = client.get_experiment_by_name("troubled").experiment_id
    (found,) = client.search_runs([experiment], f"attributes.run_name = '{name}'")
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "loss")
    return [point.value for point in sorted(history, key=lambda point: point.step)]


@pytest.mark.parametrize(
    ("blow", "said"),
    # MLflow waits for a lock for half a minute.
    [pytest.param(locked, LOCKED, marks=pytest.mark.slow), (damaged, DAMAGED)],
)
def test_a_run_outlives_what_befalls_the_database_and_says_what_it_is(
    blow: Blow, said: str, home: Path
) -> None:
    tracker, ranks, run = begun(home, "struck")
    with blow(home / "mlflow.db"):
        ranks.step(20)
        wait_for(lambda: runs(home)[0].waits_for == said, 60)
        link = run.finish("finished")
        assert link is not None
        assert f"does not accept it now ({said}); it is kept in .nbdist/spool" in link.text
        tracker.close(1)
        assert f"did not accept all of it ({said}). %dist runs --sync tries again." in sync(
            home, 60
        )
    assert sync(home, 60).startswith("1 run sent to MLflow")
    assert losses(home, "struck") == pytest.approx([1 / step + 0.5 for step in range(1, 41)])


@pytest.mark.slow
def test_a_run_whose_database_is_deleted_is_sent_anew_and_older_ones_are_told_as_lost(
    home: Path,
) -> None:
    tracker, _, run = begun(home, "older")
    run.finish("finished")
    assert tracker.flush(60)
    ranks = Ranks(2)
    run = tracker.follow(cell(run_name="struck"), ranks.telemetry)
    ranks.step(20)
    wait_for(lambda: bool(runs(home)[0].run_id) and runs(home)[0].name == "struck", 60)
    (home / "mlflow.db").unlink()
    ranks.step(20)
    run.finish("finished")
    assert tracker.flush(100), (home / "logs/tracking.log").read_text()
    tracker.close(1)
    assert losses(home, "struck") == pytest.approx([1 / step + 0.5 for step in range(1, 41)])
    assert [(row.name, row.is_lost) for row in runs(home)] == [("struck", False), ("older", True)]
    told = str(runs_table(home))
    assert "1 of them were lost when MLflow's database was deleted." in told
