"""A tracking server that dies, comes back, or never answers: nothing waits, nothing is lost."""

import socket
from pathlib import Path

import pytest

from nbdist.client.tracking.past.runs import runs, runs_table
from nbdist.client.tracking.run import Tracker
from nbdist.client.tracking.shipping.shipper import sync
from nbdist.client.tracking.shipping.ui import start_ui
from tests.tracking.conftest import Ranks, Server, cell, mlflow_client
from tests.tracking.test_embedded import wait_for


def test_a_server_killed_in_the_middle_of_a_run_gets_every_point_once(
    server: Server, tmp_path: Path
) -> None:
    home = tmp_path / ".nbdist"
    tracker, ranks = Tracker(home, server.uri, "nb"), Ranks(4)
    run = tracker.follow(cell(ranks=4), ranks.telemetry)
    ranks.step(400)
    wait_for(lambda: bool(runs(home)) and bool(runs(home)[0].run_id), 60)
    server.kill()
    ranks.step(600)
    wait_for(lambda: bool(runs(home)[0].waits_for), 30)
    link = run.finish("finished")
    assert link is not None
    assert "it is kept in .nbdist/spool and sent later: %dist runs --sync" in link.text
    server.start()
    wait_for(lambda: runs(home)[0].is_sent, 60)
    tracker.close(5)
    client = mlflow_client(server.uri)
    history = client.get_metric_history(link.run_id, "loss")
    assert sorted(p.step for p in history) == list(range(1, 1001))
    of_rank = [p.step for p in client.get_metric_history(link.run_id, "rank_loss/03")]
    assert len(of_rank) == len(set(of_rank)) > 50  # about ten a second
    assert client.get_run(link.run_id).info.status == "FINISHED"
    files = {file.path for file in client.list_artifacts(link.run_id)}
    assert files == {"cell.py", "environment.txt"}
    url, process = start_ui(home, server.uri)
    assert process is None
    assert url.startswith(f"{server.uri}/#/experiments/")


@pytest.mark.slow
def test_what_was_made_without_a_server_is_sent_by_sync(server: Server, tmp_path: Path) -> None:
    home = tmp_path / ".nbdist"
    server.kill()
    tracker, ranks = Tracker(home, server.uri, "offline"), Ranks(2)
    run = tracker.follow(cell(run_name="kept", params={"lr": 3}), ranks.telemetry)
    ranks.step(50)
    assert run.finish("failed", "ValueError: no") is not None
    tracker.close(1)
    assert str(runs_table(home)).splitlines()[1].endswith("not yet")
    said = sync(home)
    assert said.startswith(
        "Kept in .nbdist/spool: 1 run, because MLflow did not accept all of it ("
    )
    server.start()
    said = sync(home)
    assert sync(home) == "MLflow has all runs."
    (row,) = runs(home)
    client = mlflow_client(server.uri)
    stored = client.get_run(row.run_id)
    history = {key: client.get_metric_history(row.run_id, key) for key in stored.data.metrics}
    assert said == f"1 run sent to MLflow ({sum(map(len, history.values()))} points)."
    assert [point.step for point in history["loss"]] == list(range(1, 51))
    assert stored.info.status == "FAILED"
    assert stored.info.run_name == "kept"
    assert stored.data.params["lr"] == "3"
    assert stored.data.tags["nbdist.error"] == "ValueError: no"


@pytest.mark.slow
def test_resume_finds_a_run_that_only_the_server_knows(server: Server, tmp_path: Path) -> None:
    first = train_long(server, tmp_path / "a", "moved", 10)
    assert train_long(server, tmp_path / "b", "moved", 10, resume=True) == first
    history = mlflow_client(server.uri).get_metric_history(first, "loss")
    assert sorted(p.step for p in history) == list(range(1, 21))


@pytest.mark.slow
def test_resume_goes_on_with_a_newer_run_than_the_one_in_this_folder(
    server: Server, tmp_path: Path
) -> None:
    older = train_long(server, tmp_path / "a", "newer", 10)
    newer = train_long(server, tmp_path / "b", "newer", 7)
    assert train_long(server, tmp_path / "a", "newer", 5, resume=True) == newer != older
    client = mlflow_client(server.uri)
    steps = sorted(p.step for p in client.get_metric_history(newer, "loss"))
    assert steps == list(range(1, 13))
    assert [p.step for p in client.get_metric_history(older, "loss")] == list(range(1, 11))
    assert client.get_run(newer).info.status == "FINISHED"


def train_long(
    server: Server, home: Path, experiment: str, steps: int, *, resume: bool = False
) -> str:
    """Train a run called "long" beside another notebook; return MLflow's id of it."""
    tracker, ranks = Tracker(home, server.uri, experiment), Ranks(1)
    run = tracker.follow(cell(ranks=1, run_name="long", resume=resume), ranks.telemetry)
    ranks.step(steps)
    link = run.finish("finished")
    assert tracker.flush(60)
    tracker.close(5)
    assert link is not None
    return link.run_id


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers_delays_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    home = tmp_path / ".nbdist"
    with socket.create_server(("127.0.0.1", 0), backlog=50) as mute:
        tracker = Tracker(home, f"http://me:hunter2@127.0.0.1:{mute.getsockname()[1]}", "nb")
        ranks = Ranks(2)
        run = tracker.follow(cell(run_name="first"), ranks.telemetry)
        ranks.step(100)
        assert run.finish("interrupted") is not None
        assert not runs(home)[0].waits_for, "the cell ended before the server was given up"
        wait_for(lambda: bool(runs(home)[0].waits_for), 60)
        ranks = Ranks(2)
        run = tracker.follow(cell(run_name="second"), ranks.telemetry)
        ranks.step()
        wait_for(lambda: len(runs(home)) == 2 and bool(runs(home)[0].waits_for), 60)
        link = run.finish("finished")
        assert link is not None
        assert "does not accept it now" in link.text
        tracker.close(1)
    assert [(r.name, r.state, r.is_sent) for r in runs(home)] == [
        ("second", "finished", False),
        ("first", "interrupted", False),
    ]
    assert "%dist runs --sync tries again." in str(runs_table(home))
    shown = link.text + str(runs_table(home)) + (home / "logs" / "tracking.log").read_text()
    assert "hunter2" not in shown
