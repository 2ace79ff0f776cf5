"""A detached cluster: kernels are killed, others attach, and nothing of a training is missing."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.lifecycle.kernels import Family, Notebook, wait_for

STEPS = 30
TRAIN = f"""
import time
from pathlib import Path
from IPython.display import Markdown, display
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
print("before", flush=True)
for step in range({STEPS}):
    loss = model(torch.ones(2, 4)).pow(2).mean()
    loss.backward(); opt.step(); opt.zero_grad()
    print(f"rank {{rank}} step {{step}}", flush=True)
    if step == 3:
        display(Markdown("a display"))
        Path(f"busy-{{rank}}").touch()
        while wait and not Path("go").exists():
            time.sleep(0.01)
print("after")
nbdist.log(done=1.0)
loss.item()
"""
SHOWN = "for r in nbdist.current().last.values(): print(r.rank, r.value, len(r.displays), r.text)"


class Runtime:
    """The folders that all kernels of a test share."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.folder = folder
        self.sockets = sockets
        self.kernels = ExitStack()
        self.held_by: Notebook | None = None

    @contextmanager
    def notebook(self, load: str = "import nbdist\n%load_ext nbdist") -> Iterator[Notebook]:
        """Return a kernel; it is killed at the end, unless it is by then."""
        with Notebook(
            self.folder, XDG_RUNTIME_DIR=str(self.sockets), NBDIST_STATIC="1"
        ) as notebook:
            notebook.run(load)
            yield notebook

    def new(self) -> Notebook:
        """Return a kernel that lives until the tests end, or it is left."""
        return self.kernels.enter_context(self.notebook())

    def holder(self) -> Notebook:
        """Return the kernel that has the cluster: of the test before, or a new one."""
        if self.held_by is not None:
            return self.held_by
        notebook = self.attached()
        said = notebook.run("%dist attach shared")
        assert "Attached to shared: 2 ranks on cpu, gloo." in said, said
        return notebook

    def attached(self) -> Notebook:
        """Return a new kernel, which will have the cluster."""
        self.held_by = notebook = self.new()
        return notebook

    def leave(self, notebook: Notebook, *, in_order: bool = False) -> None:
        """End a kernel, else as nobody expects it; returns when no kernel has the cluster."""
        self.held_by = None
        if in_order:
            notebook.manager.shutdown_kernel()
        else:
            os.kill(notebook.pid, signal.SIGKILL)
        wait_for(lambda: "no kernel has it" in self.nbdist("status"), "the keeper to notice")

    def wait_attached(self, notebook: Notebook) -> None:
        """Wait until a kernel that attaches has a session, which terminals find."""
        path = self.sockets / "nbdist" / f"{notebook.pid}.sock"
        wait_for(path.is_socket, "the attaching")

    def nbdist(self, *words: str) -> str:
        """Run `nbdist` as in a terminal; return what it says."""
        ran = subprocess.run(
            [sys.executable, "-m", "nbdist.cli", *words],
            env=Notebook(self.folder, XDG_RUNTIME_DIR=str(self.sockets)).environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return ran.stdout

    def remove_marks(self) -> None:
        """Remove what cells leave to say where they are, and what lets them go on."""
        for mark in [*self.folder.glob("busy-*"), *self.folder.glob("go")]:
            mark.unlink()


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    # A path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="nb_", dir="/tmp") as sockets:
        runtime = Runtime(tmp_path_factory.mktemp("detach"), Path(sockets))
        with runtime.kernels:
            yield runtime


@pytest.fixture(scope="module")
def keeper(runtime: Runtime) -> Iterator[psutil.Process]:
    """The keeper of a detached cluster `shared`, which the first test's kernel has started."""
    with runtime.notebook() as notebook:
        said = notebook.run("%dist start -n 2 --device cpu --detach=shared")
        assert "%dist attach shared" in said, said
        keeper = next(p for p in psutil.Process(notebook.pid).children())
        family = Family(keeper.pid)
        notebook.on_ranks("wait, kept = False, rank + 10\n" + TRAIN, "--run unbroken")
        (runtime.folder / "unbroken").write_text(notebook.run(SHOWN))
        runtime.leave(notebook)
    yield keeper
    if runtime.held_by is not None:
        runtime.leave(runtime.held_by)
    assert "Stopped shared: 2 ranks on cpu, no cell runs" in runtime.nbdist("stop", "shared")
    family.assert_gone(10)
    keeper.wait(10)
    assert list((runtime.folder / "temp").glob("nbdist-*")) == []
    assert not (runtime.sockets / "nbdist" / "detached-shared.sock").exists()


def test_a_cell_whose_kernel_is_killed_ends_in_another_one_with_nothing_missing(
    runtime: Runtime, keeper: psutil.Process
) -> None:
    runtime.remove_marks()
    notebook = runtime.holder()
    assert "10" in notebook.on_ranks("kept", "-r 0")
    notebook.send("%%distributed --run broken\nwait = True\n" + TRAIN)
    wait_for(lambda: len(list(runtime.folder.glob("busy-*"))) == 2, "the cell")
    runtime.leave(notebook)
    assert re.search(
        r"detached shared: 2 ranks on cpu, cell \[\d+\] began", runtime.nbdist("status")
    )
    notebook = runtime.attached()
    with runtime.notebook() as other:
        attached = notebook.client.execute("%dist attach", stop_on_error=False)
        runtime.wait_attached(notebook)
        said = other.run("%dist attach")
        assert f"Kernel {notebook.pid} has the cluster shared." in said, said
    (runtime.folder / "go").touch()
    assert notebook.client._recv_reply(attached, timeout=60)["content"]["status"] == "ok"
    assert notebook.run(SHOWN) == (runtime.folder / "unbroken").read_text()
    assert "after" in notebook.run(SHOWN)
    said = notebook.run("print(nbdist.client.notebook.current.runs())")
    assert re.search(rf"broken +finished +2 +{STEPS} ", said), said
    points = notebook.run(
        "import nbdist.client.notebook.current as c, mlflow\n"
        "from nbdist.client.tracking.shipping.shipper import unsent\n"
        "folder = c._tracker().folder\n"
        "assert c._tracker().flush(120), [(r.key, r.state()) for r in unsent(folder)]\n"
        "mlflow.set_tracking_uri(c._tracker().whole_uri)\n"
        "client = mlflow.MlflowClient()\n"
        "for name in 'unbroken', 'broken':\n"
        "    runs = mlflow.search_runs(search_all_experiments=True, output_format='list',\n"
        "        filter_string=f\"attributes.run_name = '{name}'\")\n"
        "    for run in runs:\n"
        "        history = client.get_metric_history(run.info.run_id, 'loss')\n"
        "        print(run.info.status, [(p.step, p.value) for p in history])",
        180,
    )
    lines = points.strip().splitlines()
    assert len(lines) == 2, points
    assert lines[0].startswith("FINISHED [(1, "), points
    assert lines[0] == lines[1]
    assert lines[0].count("(") == STEPS


def test_a_rank_that_dies_while_nobody_is_attached_is_replaced_at_attach(
    runtime: Runtime, keeper: psutil.Process
) -> None:
    notebook = runtime.holder()
    pid = notebook.run("print(nbdist.current().status().ranks[1].pid)")
    notebook.on_ranks("kept = 7")
    runtime.leave(notebook, in_order=True)
    os.kill(int(pid), signal.SIGKILL)
    notebook = runtime.attached()
    said = notebook.run("%dist attach")
    assert "Rank 1 had died since the last cell (killed by SIGKILL)" in said, said
    said = notebook.on_ranks("x = torch.ones(1) * (rank + kept)\ndist.all_reduce(x)\nx.item()")
    assert "15.0" in said, said


def test_a_fault_in_a_cell_that_nobody_hears_is_told_recovered_and_retried_at_attach(
    runtime: Runtime, keeper: psutil.Process
) -> None:
    runtime.remove_marks()
    notebook = runtime.holder()
    notebook.send(
        "%%distributed\nimport time\nfrom pathlib import Path\n"
        "Path(f'busy-{rank}').touch()\n"
        "while not Path('go').exists(): time.sleep(0.01)\n"
        "if not Path('fixed').exists() and rank == 1: 1 / 0\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()"
    )
    wait_for(lambda: len(list(runtime.folder.glob("busy-*"))) == 2, "the cell")
    runtime.leave(notebook)
    (runtime.folder / "go").touch()
    notebook = runtime.attached()
    said = notebook.run("%dist attach")
    assert "RankError: 1 of 2 ranks failed; rank 0 was released" in said, said
    assert "ZeroDivisionError" in said, said
    (runtime.folder / "fixed").touch()
    assert "2.0" in notebook.run("%dist retry")
    assert "3 ranks" in notebook.run("%dist scale 3\nnbdist.current()")
    assert "2 ranks" in notebook.run("%dist scale 2\nnbdist.current()")


@pytest.mark.slow
def test_an_interrupt_of_the_attached_kernel_interrupts_the_cell(
    runtime: Runtime, keeper: psutil.Process
) -> None:
    runtime.remove_marks()
    notebook = runtime.holder()
    notebook.keep_busy(2)
    runtime.leave(notebook)
    notebook = runtime.attached()
    attached = notebook.client.execute("%dist attach", stop_on_error=False)
    runtime.wait_attached(notebook)
    notebook.manager.interrupt_kernel()
    reply = notebook.client._recv_reply(attached, timeout=60)
    assert reply["content"]["ename"] in ("KeyboardInterrupt", "Interrupted"), reply["content"]
    assert "idle" in notebook.run("%dist status")


@pytest.mark.slow
def test_what_cannot_be_attached_to_is_said_in_one_sentence(
    runtime: Runtime, keeper: psutil.Process
) -> None:
    if runtime.held_by is not None:
        runtime.leave(runtime.held_by)
    with runtime.notebook() as notebook:
        said = notebook.run("%dist attach nobody")
        assert "There is no detached cluster nobody." in said, said
        assert "shared: 2 ranks on cpu, no cell runs; detached since" in said, said
        said = notebook.run("%dist start -n 2 --detach=shared")
        assert "There is a detached cluster shared already" in said, said
        said = notebook.run("%dist start --detach=../x")
        assert "is no name" in said, said
        said = notebook.run("nbdist.shared.wire.VERSION += 1\n%dist attach", 60)
        assert "and this notebook" in said, said
        notebook.run("nbdist.shared.wire.VERSION -= 1\nnbdist.current")
        said = notebook.run("%dist start -n 1 --device cpu --detach=doomed")
        family = Family(notebook.pid)
        keeper_pid = next(p.pid for p in psutil.Process(notebook.pid).children())
        os.kill(keeper_pid, signal.SIGKILL)
        family.assert_gone()
        assert (runtime.sockets / "nbdist" / "detached-doomed.sock").is_socket()
        said = notebook.run("%dist stop\n%dist attach doomed")
        assert "There is no detached cluster doomed." in said, said
