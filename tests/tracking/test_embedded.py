"""Runs in the database beside the notebook: what stands in MLflow after a cell."""

import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nbdist.client.tracking.past.runs import compare, runs, runs_table
from nbdist.client.tracking.run import RunLink, Tracker
from nbdist.client.tracking.series import Point
from nbdist.client.tracking.settings import own_database
from nbdist.client.tracking.shipping.ship import Shipper
from nbdist.client.tracking.spool import Begin, SpooledRun, SpoolWriter
from nbdist.shared.processes.lifeline import is_alive
from nbdist.shared.wire import Batch, Record
from tests.tracking.conftest import Ranks, cell, client_of

SECRET = "hf_abcdefghijklmnopqrstuvwxyz0123"
STEPS = 1500
EXPLAINED = "layout ddp: dp=4 on 4 ranks, gloo\na rank sends 1.5 MB a step"


@dataclass(frozen=True)
class Notebook:
    home: Path
    client: Any
    links: dict[str, RunLink]

    def run(self, name: str) -> Any:
        return self.client.get_run(self.links[name].run_id)

    def artifact(self, name: str, file: str) -> bytes:
        return Path(self.client.download_artifacts(self.links[name].run_id, file)).read_bytes()


@pytest.fixture(scope="module")
def notebook(make_home: Callable[[], Path]) -> Notebook:
    """A notebook's session: some training cells, one after the other, then the end."""
    home = make_home()
    tracker = Tracker(home, experiment="02_train")
    links: dict[str, RunLink] = {}

    def train(name: str, sim: Ranks, steps: int, outcome: Any, *end: Any, **info: Any) -> None:
        run = tracker.follow(cell(**info), sim.telemetry)
        sim.step(steps)
        link = run.finish(outcome, *end)
        assert link is not None
        links[name] = link

    facts = {
        "proof": "equal bit for bit over 3 steps",
        "layout": "ddp",
        "model": "GPT",
        "torch": "2.13.0",
        "layout_explained": EXPLAINED,
    }
    params = {"lr": 0.03, "api_token": "xyzzy"}
    source = f"login({SECRET!r})\n"
    train(
        "big",
        Ranks(4, facts),
        STEPS,
        "finished",
        None,
        b"PNG",
        ranks=4,
        params=params,
        source=source,
    )
    message = f"ValueError: bad batch\nTraceback: {SECRET}"
    train("failed", Ranks(2), 3, "failed", message, run_name="small")
    train("stopped", Ranks(2), 3, "interrupted", run_name="small")
    train("more", Ranks(2), 5, "finished", run_name="small", resume=True, params={"lr": 1})
    train("broken", Ranks(2), 3, "failed", "ValueError: once", run_name="mended")
    assert tracker.flush(60), (home / "logs/tracking.log").read_text()
    broken = client_of(home).get_run(links["broken"].run_id)
    assert broken.data.tags["nbdist.error"] == "ValueError: once"
    train("mended", Ranks(2), 2, "finished", run_name="mended", resume=True)
    assert tracker.flush(60), (home / "logs/tracking.log").read_text()
    train("struck", Ranks(2), 7, "failed", "ValueError: once", run_name="again")
    before = links["struck"].folder.name
    train("newest", Ranks(2), 5, "finished", run_name="again", continues=before)
    assert tracker.flush(60), (home / "logs/tracking.log").read_text()
    tracker.close(5)
    return Notebook(home, client_of(home), links)


@pytest.mark.slow
def test_every_point_of_4_ranks_is_in_mlflow_once(notebook: Notebook) -> None:
    run_id = notebook.links["big"].run_id
    history = notebook.client.get_metric_history(run_id, "loss")
    assert sorted(p.step for p in history) == list(range(1, STEPS + 1))
    for key in ("rank_loss/00", "rank_comm_ms/03"):  # of so many steps, about four a second
        steps = [p.step for p in notebook.client.get_metric_history(run_id, key)]
        assert len(steps) == len(set(steps)) > STEPS // 40, key
    last = notebook.run("big").data.metrics
    assert last["loss"] == pytest.approx(1 / STEPS + 1.5)
    assert last["rank_loss/02"] == pytest.approx(1 / STEPS + 2)
    assert last["rank_comm_ms/03"] == pytest.approx(3)
    assert last["comm_pct"] == pytest.approx(15)
    assert last["step_ms"] == pytest.approx(10)


def test_a_run_says_what_it_was(notebook: Notebook) -> None:
    run = notebook.run("big")
    assert run.info.run_name == "GPT-ddp-w4-lr0.03"
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "world_size": "4",
        "backend": "gloo",
        "devices": "cpu",
        "lr": "0.03",
        "api_token": "(hidden)",
        "layout": "ddp",
        "model": "GPT",
    }
    tags = run.data.tags
    assert tags["nbdist.torch"] == "2.13.0"
    assert tags["nbdist.cell"] == "3"
    assert tags["mlflow.source.type"] == "NOTEBOOK"
    assert tags["mlflow.source.name"] == "02_train.ipynb"


def test_a_runs_page_tells_its_story(notebook: Notebook) -> None:
    said = notebook.run("big").data.tags["mlflow.note.content"]
    assert "Finished after 1,500 steps, last loss 1.50, 10.0 ms per step, 15 % of it in" in said
    assert "**Layout:** ddp on 4 ranks" in said
    assert "**Proof** (`layout.verify`): equal bit for bit over 3 steps" in said
    address = f"get-artifact?path=board.png&run_uuid={notebook.links['big'].run_id}"
    assert said.split("\n\n")[0] == f"![The board]({address})"
    of_run = f"#/metric?runs=%5B%22{notebook.links['big'].run_id}%22%5D"
    for quantity in ("comm_ms", "step_ms", "loss"):
        assert f"[{quantity}]({of_run}&metric=%22rank_{quantity}%2F00%22&" in said
    assert "board.png" not in notebook.run("stopped").data.tags["mlflow.note.content"]


def test_the_mean_loss_is_the_first_metric_which_mlflow_compares_runs_by(
    notebook: Notebook,
) -> None:
    assert next(iter(notebook.run("big").data.metrics)) == "loss"


def test_a_run_keeps_source_picture_and_environment_and_no_secret(notebook: Notebook) -> None:
    assert notebook.artifact("big", "cell.py") == b'login("(hidden)")\n'
    assert notebook.artifact("big", "board.png") == b"PNG"
    assert b"mlflow==" in notebook.artifact("big", "environment.txt")
    assert notebook.artifact("big", "layout.txt") == f"{EXPLAINED}\n".encode()
    for path in notebook.home.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    assert "xyzzy" not in str(notebook.run("big").data)


def test_a_cell_that_failed_is_failed_with_its_error(notebook: Notebook) -> None:
    run = notebook.run("failed")
    assert run.info.status == "FAILED"
    assert run.data.tags["nbdist.error"] == "ValueError: bad batch"
    assert b"Traceback" in notebook.artifact("failed", "error.txt")


def test_the_same_name_in_another_cell_is_another_run(notebook: Notebook) -> None:
    assert notebook.links["failed"].run_id != notebook.links["stopped"].run_id


def test_resume_goes_on_with_the_newest_run_of_that_name(notebook: Notebook) -> None:
    assert notebook.links["more"].run_id == notebook.links["stopped"].run_id
    run = notebook.run("more")
    assert run.info.status == "FINISHED"
    steps = [p.step for p in notebook.client.get_metric_history(run.info.run_id, "loss")]
    assert sorted(steps) == list(range(1, 9))
    assert run.data.params["lr"] == "1"


def test_a_run_that_goes_on_and_finishes_has_no_error_any_more(notebook: Notebook) -> None:
    run = notebook.run("mended")
    assert run.info.status == "FINISHED"
    assert "nbdist.error" not in run.data.tags


def test_an_attempt_that_starts_over_is_a_run_with_the_failed_one_below_it(
    notebook: Notebook,
) -> None:
    run, failed = notebook.run("newest"), notebook.run("struck")
    steps = [p.step for p in notebook.client.get_metric_history(run.info.run_id, "loss")]
    assert (run.info.run_name, sorted(steps)) == ("again", [1, 2, 3, 4, 5])
    assert run.data.tags["nbdist.attempt"] == "2"
    assert (
        "Finished in attempt 2 (1 failed before) after 5 steps"
        in run.data.tags["mlflow.note.content"]
    )
    assert (failed.info.run_name, failed.info.status) == ("again (attempt 1)", "FAILED")
    assert failed.data.tags["mlflow.parentRunId"] == run.info.run_id


def test_the_cells_last_line_has_no_number_that_changes(notebook: Notebook) -> None:
    text = notebook.links["failed"].text
    assert text == 'Saved as MLflow run "small". List runs: %dist runs. Open the UI: %dist ui.'


def test_the_runs_of_a_notebook_are_listed_newest_first(notebook: Notebook) -> None:
    rows = runs(notebook.home, "02_train")
    assert [(r.name, r.state, r.steps) for r in rows] == [
        ("again", "finished", 5),
        ("mended", "finished", 5),
        ("small", "finished", 8),
        ("small", "failed", 3),
        ("GPT-ddp-w4-lr0.03", "finished", STEPS),
    ]
    assert all(r.is_sent and r.run_id for r in rows)
    assert runs(notebook.home, "another notebook") == ()
    table = runs_table(notebook.home)
    header = ["#", "run", "state", "attempt", "layout", "ranks", "lr"]
    assert str(table).splitlines()[0].split()[:7] == header
    assert "<td>GPT-ddp-w4-lr0.03</td>" in table._repr_html_()


def test_what_was_sent_leaves_only_summary_and_curves_behind(notebook: Notebook) -> None:
    names = {path.name for path in notebook.links["big"].folder.iterdir()}
    assert names == {"state.json", "summary.json", "curves.json", "owner.lock", "ship.lock"}
    assert stat.S_IMODE((notebook.home / "spool").stat().st_mode) == 0o700


def test_a_cell_without_a_record_leaves_no_trace(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / ".nbdist")
    run = tracker.follow(cell(), Ranks(2).telemetry)
    assert run.finish("finished") is None
    ranks = Ranks(2)
    untracked = tracker.follow(cell(track=False), ranks.telemetry)
    ranks.step()
    assert untracked.finish("finished") is None
    ranks = Ranks(2)
    untrained = tracker.follow(cell(), ranks.telemetry)
    ranks.telemetry.receive(Batch(0, (Record(0, 0, "links", 0, 1, {"1@a.sent_bytes": 9.0}),)))
    assert untrained.finish("finished") is None
    tracker.close(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_run_is_finished_in_mlflow_with_a_tag_and_goes_on_without(
    home: Path,
) -> None:
    tracker = Tracker(home, experiment="nb")

    def train(outcome: Any, **changes: Any) -> Any:
        ranks = Ranks(2)
        run = tracker.follow(cell(run_name="stopped", **changes), ranks.telemetry)
        ranks.step(3)
        link = run.finish(outcome, "All ranks have stopped.")
        assert link is not None
        assert tracker.flush(60), (home / "logs/tracking.log").read_text()
        return client_of(home).get_run(link.run_id)

    run = train("interrupted")
    assert (run.info.status, run.data.tags["nbdist.ended"]) == ("FINISHED", "interrupted")
    assert "nbdist.error" not in run.data.tags
    assert run.data.tags["mlflow.note.content"].startswith("Interrupted after 3 steps")
    (row,) = runs(home)
    assert row.state == compare(home, [row]).entries[0].state == "interrupted"
    run = train("finished", resume=True)
    assert run.info.status == "FINISHED"
    assert "nbdist.ended" not in run.data.tags
    tracker.close(5)


@pytest.mark.slow
def test_a_run_that_nobody_finished_ends_with_the_session(home: Path) -> None:
    tracker, ranks = Tracker(home, experiment="nb"), Ranks(1)
    tracker.follow(cell(ranks=1), ranks.telemetry)
    ranks.step(3)
    tracker.close(20)
    assert [(r.state, r.steps) for r in runs(home)] == [("interrupted", 3)]


def test_a_folder_that_cannot_be_written_costs_the_run_and_not_the_cell(tmp_path: Path) -> None:
    (tmp_path / ".nbdist").write_text("a file where the folder should be")
    ranks = Ranks(1)
    run = Tracker(tmp_path / ".nbdist").follow(cell(ranks=1, run_name="a"), ranks.telemetry)
    ranks.step(3)
    link = run.finish("finished")
    assert link is not None
    assert link.text.startswith("Run a is not tracked: The folder ")
    assert link.text.endswith("Training was not affected.")


def test_what_mlflow_refuses_is_left_out_alone_and_counted(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin = Begin(f"{1:020d}-1-1", own_database(home), "nb", "a", 1)
    writer = SpoolWriter(home / "spool", begin, {})
    names = ["bad$name" if n == 5 else "other" for n in range(9)]
    writer.points(Point(n, n, {"good": 1.0, name: 1.0}) for n, name in enumerate(names))
    writer.end("FINISHED", 10)
    writer.close()
    assert not Shipper(home, 0).round()
    state = SpooledRun(writer.folder).state()
    assert (state.sent, state.refused, state.is_done) == (17, 1, True)
    assert "MLflow refused bad$name" in caplog.text


def test_sending_everything_again_stores_nothing_twice(home: Path) -> None:
    begin = Begin(f"{1:020d}-1-1", own_database(home), "nb", "a", 1)
    writer = SpoolWriter(home / "spool", begin, {})
    writer.points(Point(n, n, {"loss": n / 7}) for n in range(300))
    writer.flush()
    run = SpooledRun(writer.folder)
    assert Shipper(home, kernel_pid=1).round()
    state = run.state()
    assert state.sent == 300
    state.offset = 0
    run.save(state)
    assert Shipper(home, kernel_pid=1).round()
    history = client_of(home).get_metric_history(state.run_id, "loss")
    assert len(history) == 300
    writer.close()


def test_a_model_is_waited_for_while_its_kernel_moves_it(home: Path, tmp_path: Path) -> None:
    left = tmp_path / "small-1"
    left.mkdir()
    begin = Begin(f"{1:020d}-1-1", own_database(home), "nb", "a", 1)
    writer = SpoolWriter(home / "spool", begin, {})
    run, shipper = SpooledRun(writer.folder), Shipper(home, kernel_pid=1)
    writer.model(left, {"name": "small", "alias": ""})
    assert shipper.round()
    assert run.state().error == "the kernel still moves its model"
    assert run.read(run.state().offset).entries
    writer.close()  # and was killed
    assert not shipper.round(patient=False)
    assert client_of(home).get_run(run.state().run_id).info.status == "KILLED"
    assert left.is_dir()


@pytest.mark.parametrize("fate", ["removed", "damaged"])
def test_a_run_whose_earlier_part_will_never_be_sent_stands_on_its_own(
    fate: str, home: Path
) -> None:
    before, after = (f"{n:020d}-1-1" for n in (1, 2))
    begin = Begin(after, own_database(home), "nb", "a", 1, continues=before)
    writer = SpoolWriter(home / "spool", begin, {})
    writer.end("FINISHED", 2)
    writer.close()
    if fate == "damaged":
        (home / "spool" / before).mkdir()
        (home / "spool" / before / "ops.jsonl").write_text("what a crash has left\n")
    assert not Shipper(home, 0).round()
    assert client_of(home).get_run(SpooledRun(writer.folder).state().run_id).info.run_name == "a"


def test_the_run_of_a_killed_kernel_ends_as_killed_and_nothing_is_left_running(home: Path) -> None:
    code = f"""
import pathlib, time
from nbdist.client.tracking.run import Tracker
from tests.tracking.conftest import Ranks, cell
tracker, ranks = Tracker(pathlib.Path({str(home)!r}), experiment="nb"), Ranks(2)
run = tracker.follow(cell(run_name="doomed"), ranks.telemetry)
ranks.step(200)
while not tracker.shipping._process:
    time.sleep(0.01)
print(tracker.shipping._process.pid, flush=True)
time.sleep(60)
"""
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path.cwd())
    with kernel:
        assert kernel.stdout is not None
        shipping = int(kernel.stdout.readline())
        wait_for(lambda: bool(runs(home)) and bool(runs(home)[0].run_id), 30)
        wait_for(lambda: len(compare(home, runs(home)).entries[0].curve) == 200, 30)
        kernel.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_alive(shipping), 30)
    # It has four seconds for what is left: on a machine that is loaded the next kernel sends it.
    wait_for(lambda: not Shipper(home, 0).round(patient=False), 30)
    (row,) = runs(home)
    assert (row.state, row.is_sent) == ("killed", True)
    (entry,) = compare(home, [row]).entries
    assert len(entry.curve) == 200
    assert entry.throughput is not None
    assert entry.throughput.value == pytest.approx(2 * 32 / 0.01)
    run = client_of(home).get_run(row.run_id)
    assert run.info.status == "KILLED"
    assert len(client_of(home).get_metric_history(row.run_id, "loss")) == 200


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
