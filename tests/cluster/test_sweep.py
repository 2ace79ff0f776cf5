"""`-p lr=[...]`: a cell once for each value, nested under a study in MLflow."""

import json
import time

import pytest

import nbdist
from tests.cluster.conftest import Kernel

TRAIN = """
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=lr)
for i in range(5):
    model(torch.ones(2, 4)).square().mean().backward()
    opt.step()
"""


def when_sent(notebook: Kernel) -> list[str]:
    """Return the list of runs once MLflow has all of them."""
    deadline = time.monotonic() + 100
    while "not yet" in (text := notebook.run("%dist runs --sync --plain", timeout_s=100).text):
        assert time.monotonic() < deadline, text
        time.sleep(0.2)  # another process is making the database
    return text.splitlines()


def test_a_sweep_sets_each_value_on_all_ranks(session: nbdist.Session) -> None:
    swept = session.sweep("(rank, lr, width)", {"lr": [0.1, 0.2], "width": [8]}, track=False)
    assert [run.values for run in swept] == [{"lr": 0.1, "width": 8}, {"lr": 0.2, "width": 8}]
    assert [run.result.value_list for run in swept] == [
        [(0, 0.1, 8), (1, 0.1, 8)],
        [(0, 0.2, 8), (1, 0.2, 8)],
    ]


def test_a_name_of_the_ranks_own_is_refused_from_python_too(session: nbdist.Session) -> None:
    with pytest.raises(nbdist.UsageError, match="-p device would replace"):
        session.run("pass", params={"device": 1})
    with pytest.raises(nbdist.UsageError, match="-p rank would replace"):
        session.sweep("pass", {"rank": [5, 6]})
    assert session.run("rank").value_list == [0, 1]


def test_text_in_quotes_and_lists_with_spaces_reach_the_ranks(notebook: Kernel) -> None:
    ran = notebook.cell(
        "print(opt, sizes)", """-r 0 --no-track -p opt="sgd" -p sizes=(32, 'a b')"""
    )
    assert ran.error is None
    assert "sgd (32, 'a b')" in ran.text


@pytest.mark.slow
def test_a_sweep_is_nothing_to_resume_and_its_runs_are_named(notebook: Kernel) -> None:
    assert notebook.cell(TRAIN, "--run tried -p lr=0.1").error is None  # an older one of the name
    assert notebook.cell(TRAIN, "--run tried -p lr=[1e-3,0.1]").error is None
    refused = notebook.cell("print('ran')", "--run tried --resume -p lr=0.1")
    assert refused.error is not None
    assert refused.error[1] == (
        "tried is a sweep, and --resume continues one run: give --run one of its runs, "
        "lr0.001, lr0.1."
    )
    assert "ran\n" not in refused.text


def test_a_sweeps_runs_are_nested_and_compared(notebook: Kernel) -> None:
    ran = notebook.cell(TRAIN, "--run rates -p lr=[1e-3,0.1] -p fixed=(1,2)")
    assert ran.error is None
    lines = ran.text.splitlines()
    assert lines[0] == "2 runs of this cell, one for each lr."
    at = [lines.index(f"Run {n} of 2: lr={lr}") for n, lr in ((1, "0.001"), (2, "0.1"))]
    assert at == sorted(at)
    assert 'Saved as MLflow run "lr0.001". List runs: %dist runs. Open the UI: %dist ui.' in lines
    assert any("has the lowest loss" in line or "No clear winner" in line for line in lines)
    sent = when_sent(notebook)
    names = [" ".join(line.split()[1:3]) for line in sent]
    place = names.index("rates finished")
    assert names[place + 1 : place + 3] == ["└ lr0.001", "└ lr0.1"]
    client = """
from mlflow import MlflowClient
import os, json
_c = MlflowClient(f"sqlite:///{os.getcwd()}/.nbdist/mlflow.db")
_runs = _c.search_runs([e.experiment_id for e in _c.search_experiments()])
_study = next(r for r in _runs if r.info.run_name == "rates")
_in = [r for r in _runs if r.data.tags.get("mlflow.parentRunId") == _study.info.run_id]
print("TOLD", json.dumps({
    "names": sorted(r.info.run_name for r in _in),
    "lr": sorted(r.data.params["lr"] for r in _in),
    "fixed": sorted(r.data.params["fixed"] for r in _in),
    "study": [_study.info.status, _study.data.params["lr"], _study.data.tags["nbdist.kind"]],
    "files": sorted(f.path for f in _c.list_artifacts(_study.info.run_id)),
    "table": open(_c.download_artifacts(_study.info.run_id, "table.json")).read(),
}))"""
    asked = notebook.run(client, timeout_s=60)
    assert asked.error is None, asked.error
    (line,) = [line for line in asked.text.splitlines() if line.startswith("TOLD ")]
    told = json.loads(line.removeprefix("TOLD "))
    assert told["names"] == ["lr0.001", "lr0.1"]
    assert told["lr"] == ["0.001", "0.1"]
    assert told["fixed"] == ["(1, 2)", "(1, 2)"]
    assert told["study"] == ["FINISHED", "[0.001, 0.1]", "study"]
    assert told["files"] == ["cell.py", "environment.txt", "table.json"]
    table = json.loads(told["table"])
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["run"], row["state"], row["steps"]) for row in rows] == [
        ("lr0.001", "finished", 5),
        ("lr0.1", "finished", 5),
    ]
    assert rows[1]["loss"] < rows[0]["loss"]


@pytest.mark.slow
def test_runs_are_compared_by_the_name_of_their_study_with_a_picture(notebook: Kernel) -> None:
    notebook.cell(TRAIN, "--run again -p lr=[1e-3,0.1]")
    ran = notebook.run("%dist runs again")
    assert "lr0.001" in ran.text
    assert ["image/png", "text/html", "text/plain"] in ran.mimes
    plain = notebook.run("%dist runs lr0.1 lr0.001 --plain")
    assert plain.text.splitlines()[0].split()[:2] == ["run", "lr"]
    assert not plain.mimes
    refused = notebook.run("%dist runs lr0.11")
    assert refused.error is not None
    assert refused.error[1].startswith("No run is called 'lr0.11'; did you mean lr0.1? The newest")


@pytest.mark.slow
def test_an_error_ends_the_sweep_and_keeps_the_runs_before(notebook: Kernel) -> None:
    ran = notebook.cell(TRAIN + "assert lr < 0.2", "--run broken -p lr=[0.1,0.3,0.5]")
    assert ran.error is not None
    assert "The sweep has ended with run 2 of 3; the one before it is kept; 1 was not begun." in (
        ran.text
    )
    assert "Run 3 of 3" not in ran.text
    listed = notebook.run("%dist runs --plain").text.splitlines()
    states = {line.split()[1]: line.split()[2] for line in listed if "└" not in line}
    assert states["broken"] == "failed"
    assert "lr=0.3" in notebook.run("%dist retry").text


@pytest.mark.slow
def test_a_value_that_failed_before_its_first_step_stands_in_the_list(notebook: Kernel) -> None:
    ran = notebook.cell("assert lr < 0.2, lr\n" + TRAIN, "--run early -p lr=[0.1,0.3]")
    assert ran.error is not None
    listed = [line.split() for line in notebook.run("%dist runs --plain").text.splitlines()]
    place = next(i for i, line in enumerate(listed) if line[1:3] == ["early", "failed"])
    assert [line[1:4] for line in listed[place + 1 : place + 3]] == [
        ["└", "lr0.1", "finished"],
        ["└", "lr0.3", "failed"],
    ]


def test_an_interrupt_ends_the_sweep(notebook: Kernel) -> None:
    waiting = TRAIN + "\nimport time\nprint('asleep', lr)\ntime.sleep(60 * (lr > 0.2))"
    ran = notebook.cell(waiting, "-p lr=[0.1,0.3] --no-track", interrupt_after=["asleep 0.3"])
    assert ran.error is not None
    assert ran.error[0] in ("KeyboardInterrupt", "Interrupted")
    assert "The sweep has ended with run 2 of 2; the one before it is kept." in ran.text


@pytest.mark.slow
def test_a_failed_run_of_a_sweep_is_tried_again(notebook: Kernel) -> None:
    flaky = TRAIN + "tries = globals().get('tries', 0) + 1\nassert lr < 0.2 or tries > 2"
    ran = notebook.cell(flaky, "-p lr=[0.1,0.3] --no-track --retry 2")
    assert ran.error is None
    assert "Attempt 2 of 3" in ran.text
    assert "finished" in ran.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-p rank=[5,6]", "-p rank would replace what cells find as rank on each rank"),
        ("-p torch=5", "-p torch would replace"),
        ("-p lr=[] ", "-p lr=[] has no value to run the cell with."),
        ("--run a --resume -p lr=[1,2]", "--resume continues one run"),
        ("-p a=[1,2,3,4,5,6,7,8] -p b=[1,2,3,4,5,6,7,8,9]", "would be 72 runs"),
    ],
)
def test_what_no_sweep_can_be_is_refused_in_a_line(
    notebook: Kernel, options: str, said: str
) -> None:
    ran = notebook.cell("print('ran')", options)
    assert ran.error is not None
    assert said in ran.error[1]
    assert "ran\n" not in ran.text


@pytest.mark.slow
def test_the_layout_of_a_run_is_that_of_the_model_it_trains(notebook: Kernel) -> None:
    model = "model = torch.nn.Linear(4, 1)\n"
    step = (
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for i in range(3):\n    model(torch.ones(2, 4)).sum().backward(); opt.step()"
    )
    spread = model + 'nbdist.parallelize(model, "ddp")\n'
    wrapped = model + "model = torch.nn.parallel.DistributedDataParallel(model)\n"
    assert notebook.cell(spread + step, "--run spread").error is None
    assert notebook.cell(step, "--run later").error is None
    assert notebook.cell("kept = model\n" + model + step, "-r 0 --run plain").error is None
    assert notebook.cell(wrapped + step, "--run wrapped").error is None
    header, *rows = notebook.run("%dist runs --plain").text.splitlines()
    at = header.index("layout")
    layouts = {row.split()[1]: row[at:].split("  ")[0] for row in rows if len(row) > at}
    assert [layouts[name] for name in ("spread", "later", "wrapped")] == ["ddp"] * 3
    assert layouts["plain"] == ""


FOLDS = """
import torch
from torch.nn.parallel import DistributedDataParallel
class Small(torch.nn.Linear): pass
last = []
def fit(fold, steps):
    model = DistributedDataParallel(Small(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = model(torch.ones(2, 2)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    last.append(loss.item())
for fold in range(3):
    torch.manual_seed(fold)
    fit(fold, 2)
print("LAST", rank, *(f"{x:.6g}" for x in last))
"""


@pytest.mark.slow
def test_folds_in_one_cell_are_a_run_that_has_the_last_loss_of_each(notebook: Kernel) -> None:
    ran = notebook.cell(FOLDS)
    assert ran.error is None
    told = next(line for line in ran.text.splitlines() if "LAST 0" in line)
    asked = """
from pathlib import Path
from nbdist.client.tracking.past.runs import runs
row = runs(Path(".nbdist"))[0]
print("ROW", row.name, row.steps, *(f"{x:.6g}" for x in (*row.losses_before, row.values["loss"])))
"""
    said = notebook.run(asked).text.split("ROW ")[1].split()
    assert said == ["Small-ddp-w2", "6", *told.split("LAST 0 ")[1].split()]
    assert "last loss: of a cell with several trainings" in notebook.run("%dist runs").text


@pytest.mark.slow
def test_a_run_of_a_plain_module_is_called_by_the_class_that_a_cell_has_named(
    notebook: Kernel,
) -> None:
    ran = notebook.cell(FOLDS.replace("    model = D", "    global model; model = Small(2, 1) # D"))
    assert ran.error is None
    assert 'Saved as MLflow run "Small-w2".' in ran.text
