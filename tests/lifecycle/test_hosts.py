"""The processes beside the ranks: each in a session of its own, each may be killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.lifecycle.kernels import Family, Notebook, listening, wait_for

SUM = "x = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nx.item()"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("hosts")) as kernel:
        yield kernel


@pytest.fixture
def notebook(kernel: Notebook) -> Iterator[Notebook]:
    """A new cluster, in the kernel that the tests here share."""
    kernel.start()
    yield kernel
    kernel.run("%dist stop")
    for mark in kernel.folder.glob("run-*"):
        mark.unlink()


@pytest.mark.slow
def test_every_process_has_a_session_of_its_own_which_an_interrupt_of_the_kernel_misses(
    notebook: Notebook,
) -> None:
    pids = notebook.pids()
    assert set(pids) == {"parent", "controller", "store", "rank 0", "rank 1"}
    assert {key: os.getsid(pid) for key, pid in pids.items()} == pids
    assert os.getsid(notebook.pid) not in pids.values()
    os.killpg(os.getpgid(notebook.pid), signal.SIGINT)
    assert "3.0" in notebook.on_ranks(SUM)
    assert notebook.pids() == pids


def test_stop_ends_ranks_store_and_controller_and_nothing_listens(notebook: Notebook) -> None:
    parent = notebook.pids()["parent"]
    family = Family(notebook.pid)
    assert "Stopped" in notebook.run("%dist stop")
    wait_for(lambda: len(family.living()) == 1, "all but the parent to end", 5)
    assert family.living()[0].startswith(f"{parent} ")
    assert listening([psutil.Process(parent)]) == []
    assert notebook.keys == []
    said = notebook.on_ranks("1")
    assert "No ranks are running" in said
    assert "%dist start" in said


def test_ranks_live_and_work_on_when_their_parent_is_killed(notebook: Notebook) -> None:
    pids = notebook.pids()
    notebook.on_ranks("kept = rank + 10")
    os.kill(pids["parent"], signal.SIGKILL)
    wait_for(lambda: not notebook_parent_alive(notebook), "the launcher to see it")
    assert "10" in notebook.on_ranks("print(kept)")
    assert "3.0" in notebook.on_ranks(SUM)
    # The deaths of ranks are still seen, and a new parent replaces them.
    notebook.send(
        "%%distributed\nimport pathlib, time\npathlib.Path(f'run-{rank}').touch()\n"
        "dist.recv(x, src=1) if rank == 0 else time.sleep(600)"
    )
    wait_for(lambda: len(list(notebook.folder.glob("run-*"))) == 2, "the cell to run")
    os.kill(pids["rank 1"], signal.SIGKILL)
    wait_for(lambda: notebook_parent_alive(notebook), "a new parent")
    assert notebook.pids()["rank 1"] != pids["rank 1"]
    assert "idle" in notebook.run("%dist status")
    assert "10" in notebook.on_ranks("print(kept)", "-r 0")
    assert "3.0" in notebook.on_ranks(SUM)


def notebook_parent_alive(notebook: Notebook) -> bool:
    return "True" in notebook.run("nbdist.client.notebook.current._launcher.alive")


@pytest.mark.slow
def test_stop_and_start_work_after_the_parent_was_killed(notebook: Notebook) -> None:
    family = Family(notebook.pid)
    os.kill(notebook.pids()["parent"], signal.SIGKILL)
    assert "Stopped" in notebook.run("%dist stop")
    family.assert_gone()
    assert "Started" in notebook.run("%dist start -n 2 --device cpu")
    assert "3.0" in notebook.on_ranks(SUM)


def test_nothing_is_left_when_first_the_parent_and_then_the_kernel_is_killed(
    tmp_path: Path,
) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.start()
        family = Family(notebook.pid)
        os.kill(notebook.pids()["parent"], signal.SIGKILL)
        os.kill(notebook.pid, signal.SIGKILL)
        family.assert_gone()
        assert notebook.keys == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "%dist restart",
        pytest.param("%dist stop\n%dist start -n 2 --device cpu", marks=pytest.mark.slow),
    ],
)
def test_a_killed_controller_is_one_clear_error_and_a_restart_mends_it(
    notebook: Notebook, way: str
) -> None:
    controller = notebook.pids()["controller"]
    notebook.send(
        "%%distributed\nimport pathlib, time\npathlib.Path(f'run-{rank}').touch()\ntime.sleep(600)"
    )
    wait_for(lambda: len(list(notebook.folder.glob("run-*"))) == 2, "the cell to run")
    os.kill(controller, signal.SIGKILL)
    for said in (notebook.on_ranks("1"), notebook.run("nbdist.current().pull('x')")):
        assert "ClusterError: ipyparallel's controller has ended (killed by SIGKILL" in said
        assert "%dist restart" in said
        assert "Traceback" not in said
    assert "controller has ended" in notebook.run("%dist status")
    notebook.run(way)
    assert "3.0" in notebook.on_ranks(SUM)
    assert controller not in notebook.pids().values()


def test_a_killed_store_is_one_clear_error_what_ranks_hold_can_be_saved_and_a_restart_mends_it(
    notebook: Notebook,
) -> None:
    notebook.on_ranks("kept = rank + 10")
    os.kill(notebook.pids()["store"], signal.SIGKILL)
    wait_for(lambda: "store" in notebook.run("%dist status"), "the store's end to be seen")
    said = notebook.on_ranks("1")
    assert "ClusterError: The store" in said
    assert "%dist restart" in said
    assert "[10, 11]" in notebook.run("nbdist.current().pull('kept')")
    assert "%dist restart" in notebook.run("%dist restart -r 1")
    assert "New processes" in notebook.run("%dist restart")
    assert "3.0" in notebook.on_ranks(SUM)
