"""`nbdist status | stacks | board | stop` from a process of their own, while a cell runs."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lifecycle.kernels import Family, Notebook, wait_for

_LOOP = """%%distributed --no-track
import pathlib, time
for i in range(100_000):
    time.sleep(0.01)  # the line to find
    nbdist.log(done=i)
    pathlib.Path(f"busy-{rank}").touch()
"""


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A user's folder for sockets; short, for their paths are."""
    with tempfile.TemporaryDirectory(prefix="nb_", dir="/tmp") as folder:
        yield Path(folder)


def nbdist(notebook: Notebook, *words: str) -> tuple[int, str]:
    """Run `nbdist` as in a terminal; return its exit status and all that it says."""
    ran = subprocess.run(
        # Other notebooks of this user may have clusters: of other tests, too.
        [sys.executable, "-m", "nbdist.cli", *words, "--pid", str(notebook.pid)],
        env=notebook.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return ran.returncode, ran.stdout


def test_a_terminal_asks_and_stops_a_cluster_while_a_cell_runs(
    tmp_path: Path, runtime: Path
) -> None:
    with Notebook(tmp_path, XDG_RUNTIME_DIR=str(runtime)) as notebook:
        notebook.start()
        path = runtime / "nbdist" / f"{notebook.pid}.sock"
        assert path.is_socket()
        family = Family(notebook.pid)
        running = notebook.client.execute(_LOOP, stop_on_error=False)
        wait_for(lambda: len(list(tmp_path.glob("busy-*"))) == 2, "the cell")

        code, said = nbdist(notebook, "status")
        assert code == 0, said
        assert said.startswith("2 ranks on cpu"), said
        assert said.count("(line ") == 2, said
        code, said = nbdist(notebook, "stacks", "-r", "1")
        assert code == 0, said
        assert "rank 1: " in said, said
        assert "time.sleep(0.01)" in said, said
        assert "rank 0: " not in said
        picture = tmp_path / "board.png"
        code, said = nbdist(notebook, "board", "ranks", "--png", str(picture))
        assert code == 0, said
        assert re.search(r"^\[00:\d\d\]", said), said
        assert said.count("logs") == 2, said
        assert picture.read_bytes().startswith(b"\x89PNG")
        code, said = nbdist(notebook, "stacks", "-r", "7")
        assert code == 1, said
        assert "Error" in said, said
        assert "Traceback" not in said, said

        code, said = nbdist(notebook, "stop")
        assert code == 0, said
        assert f"in {tmp_path}." in said, said
        reply = notebook.client._recv_reply(running, timeout=60)
        assert reply["content"]["ename"] == "KeyboardInterrupt", reply["content"]
        assert "(nbdist stop), and what they held is gone" in reply["content"]["evalue"]
        ranks = [line for line in family.living() if "nbdist.host.parent" in line]
        assert len(ranks) == 1, ranks  # it stays for the next start
        assert not path.exists()
        code, said = nbdist(notebook, "status")
        assert code == 1, said
        assert "the cluster was stopped at" in notebook.run("%%distributed\n1")

        # The kernel is well, and so is its next cluster.
        said = notebook.run("%dist start -n 2 --device cpu")
        assert "Started 2 ranks" in said, said
        assert "2.0" in notebook.on_ranks("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()")
        assert nbdist(notebook, "stop")[0] == 0
        assert "No ranks are running" in notebook.run("%dist status")


@pytest.mark.slow
def test_a_killed_kernel_is_not_found(tmp_path: Path, runtime: Path) -> None:
    with Notebook(tmp_path, XDG_RUNTIME_DIR=str(runtime)) as notebook:
        notebook.start()
        family = Family(notebook.pid)
        notebook.manager.shutdown_kernel(now=True)
        family.assert_gone()
        (path,) = (runtime / "nbdist").iterdir()  # nobody was left to remove it
        code, said = nbdist(notebook, "status")
        assert code == 1, said
        assert "Traceback" not in said, said
        assert not path.exists()
