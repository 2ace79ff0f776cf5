"""No process and no key outlives the notebook's kernel, however it ends, whatever ranks do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.lifecycle.kernels import Family, Notebook, private_environment, wait_for

# Five ranks in five states, a shipping process, and (where it is worth its ten seconds) the UI.
TRAIN = "nbdist.log(loss=1.0)"


def _start_everything(notebook: Notebook, ui: bool = False) -> Family:
    notebook.start("-n 5 --device cpu --threads 1")
    said = notebook.on_ranks(TRAIN)
    assert "Error" not in said, said
    if ui:
        assert "http://127.0.0.1" in notebook.run("%dist ui")
    notebook.keep_busy()
    family = Family(notebook.pid)
    commands = [" ".join(p.cmdline()) for p in family.processes]
    assert any("tracking.ship" in c for c in commands), commands
    assert any("mlflow server" in c for c in commands) is ui, commands
    assert len(notebook.keys) == 1
    return family


def test_kill_9_of_the_kernel_leaves_nothing(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        family = _start_everything(notebook, ui=True)
        os.kill(notebook.pid, signal.SIGKILL)
        family.assert_gone()
        assert notebook.keys == []


@pytest.mark.slow  # a restart begins with it
def test_shutdown_of_a_busy_kernel_leaves_nothing(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        family = _start_everything(notebook)
        notebook.manager.shutdown_kernel()
        family.assert_gone()
        assert notebook.keys == []


@pytest.mark.slow
def test_restart_of_a_busy_kernel_leaves_nothing_and_a_new_cluster_starts(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        family = _start_everything(notebook)
        notebook.manager.restart_kernel()
        family.assert_gone()
        assert notebook.keys == []
        notebook.client.wait_for_ready(timeout=60)
        notebook.start()
        assert "3.0" in notebook.on_ranks(
            "x = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nx.item()"
        )


# A kernel with an idle cluster is killed in test_sockets.py as well.
@pytest.mark.slow  # those above have busy ranks
@pytest.mark.parametrize("how", ["shutdown", "kill"])
def test_an_idle_cluster_ends_with_its_kernel(tmp_path: Path, how: str) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.start()
        family = Family(notebook.pid)
        if how == "kill":
            os.kill(notebook.pid, signal.SIGKILL)
        else:
            notebook.manager.shutdown_kernel()
        family.assert_gone()
        assert notebook.keys == []


# Code of users that never ends: a model's, in the process of estimates, and a cell's, in a fork.
ESTIMATE = """
import nbdist
def factory():
    while True: pass
nbdist.estimate(factory, [], "ddp", 2)
"""
DRY = "import nbdist; nbdist.dry('while True: pass', 2)"


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(ESTIMATE, id="estimate", marks=pytest.mark.slow),
        pytest.param(DRY, id="dry run"),
    ],
)
def test_kill_9_of_who_asks_leaves_no_process_without_numbers(code: str) -> None:
    program = subprocess.Popen([sys.executable, "-c", code])
    try:
        family = _children_that_compute(program.pid)
    finally:
        program.kill()
        program.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


# A script of cells, as `%dist scaling` and `%dist export --check` run it.
SCRIPT = """
from pathlib import Path
from nbdist.client.export.launch import launch
from nbdist.client.export.script import ScriptOptions
launch(Path("endless.py").resolve(), ScriptOptions(2, "cpu", threads=1), Path(), timeout_s=600)
"""
ENDLESS = "import pathlib, os\npathlib.Path('busy-' + os.environ['RANK']).touch()\nwhile True: pass"


@pytest.mark.slow
def test_kill_9_of_who_runs_a_script_of_cells_leaves_no_rank_of_it(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS, encoding="utf-8")
    environ = private_environment(tmp_path)
    program = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environ)
    try:
        wait_for(lambda: len([*tmp_path.glob("busy-*")]) == 2, "busy ranks", 120)
        family = Family(program.pid)
        assert len(family.processes) >= 3  # torchrun and its ranks
    finally:
        program.kill()
        program.wait()
    family.assert_gone()


def _children_that_compute(pid: int) -> list[psutil.Process]:
    """Return the processes of a program once one of them has computed for some seconds."""
    while True:
        family = psutil.Process(pid).children(recursive=True)
        if any(sum(one.cpu_times()[:2]) > 3 for one in family):
            return family
        time.sleep(0.05)
