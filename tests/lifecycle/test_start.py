"""Starts that fail, starts in other ways, and scripts: one clear error, nothing left behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import nbdist
from nbdist.client.cluster import patience
from nbdist.client.cluster.launchers import local
from nbdist.client.cluster.launchers.local import LocalLauncher
from nbdist.client.notebook import current
from nbdist.shared.errors import StartError
from nbdist.shared.options import ClusterOptions
from tests.lifecycle.kernels import ROOT, Family, Notebook, private_environment, wait_for

no_cuda = pytest.mark.skipif(bool(torch.version.cuda), reason="this torch can use a GPU")
SUM = "x = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nx.item()"

CRASH = """
import os, sys, threading
# Only in a rank: it sets RANK before anything else of it runs.
def look(event, args):
    if event == "import" and os.environ.get("RANK") == "1" and os.environ.get("CRASH"):
        os.write(2, b"the disk is on fire\\n")
        os._exit(7)
sys.addaudithook(look)
"""

HANG = """
import os, sys, time
# Only in a rank, as above: no start ends while the file is there.
def look(event, args):
    if event == "import" and os.environ.get("RANK") == "1":
        while os.path.exists(os.environ["HANG"]):
            time.sleep(0.01)
sys.addaudithook(look)
"""

# In the kernel: interrupts it as it does something for the first time.
INTERRUPT = """
import os, signal, sys
awaited = ["{}"]
def look(event, args):
    if event in awaited:
        awaited.clear()
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(look)
"""
EVENTS = {"parent": "subprocess.Popen", "keys": "fcntl.flock"}

THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=[600], daemon=True, name="site").start()
"""


def site_folder(folder: Path, source: str) -> str:
    """Return a folder whose sitecustomize every Python runs that has it on its path."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(source)
    return str(site)


def assert_only_parent_left(notebook: Notebook) -> None:
    family = Family(notebook.pid)

    def is_parent(line: str) -> bool:
        return "nbdist.host.parent" in line and os.getsid(pid := int(line.split()[0])) == pid

    wait_for(
        lambda: len(family.living()) <= 1 and all(map(is_parent, family.living())),
        "only the parent to be left",
        timeout_s=30,
    )
    wait_for(lambda: notebook.keys == [], "the keys to be removed", timeout_s=30)


@pytest.mark.slow
def test_a_rank_that_crashes_while_starting_is_one_error_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    site = site_folder(tmp_path, CRASH)
    with Notebook(tmp_path, PYTHONPATH=f"{site}:{ROOT}", CRASH="1") as notebook:
        said = notebook.run("import nbdist\n%load_ext nbdist\n%dist start -n 2 --device cpu")
        assert "StartError: Rank 1 ended while starting" in said
        assert "the disk is on fire" in said
        assert "Do:  %dist doctor" in said
        assert "Traceback" not in said
        assert_only_parent_left(notebook)
        assert "No ranks are running" in notebook.run("%dist status")


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("parent", marks=pytest.mark.slow),
        pytest.param("keys", marks=pytest.mark.slow),
        pytest.param("controller", marks=pytest.mark.slow),
        "ranks",
    ],
)
def test_an_interrupt_while_starting_leaves_nothing_and_the_next_start_works(
    tmp_path: Path, moment: str
) -> None:
    hang = tmp_path / "hang"
    hang.touch()
    site = site_folder(tmp_path, HANG)
    with Notebook(tmp_path, PYTHONPATH=f"{site}:{ROOT}", HANG=str(hang)) as notebook:
        notebook.run("import nbdist.client.session.session\n%load_ext nbdist")
        if moment in EVENTS:
            notebook.run(INTERRUPT.format(EVENTS[moment]))
        notebook.send("%dist start -n 4 --device cpu")
        if moment not in EVENTS:
            kernel = psutil.Process(notebook.pid)
            most = {"controller": 3, "ranks": 9}[moment]
            wait_for(lambda: len(kernel.children(recursive=True)) >= most, f"{most} processes")
            notebook.manager.interrupt_kernel()
        said = notebook.run("%dist status")
        assert "No ranks are running" in said
        assert notebook.run("%dist stop").strip() == "No ranks are running."
        assert_only_parent_left(notebook)
        hang.unlink()
        assert "Started" in notebook.run("%dist start -n 2 --device cpu")
        assert "3.0" in notebook.on_ranks(SUM)
        assert len(notebook.keys) == 1


@pytest.mark.slow
def test_a_python_that_cannot_be_run_is_one_error_and_a_second_start_is_another(
    tmp_path: Path,
) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.run("import sys; real, sys.executable = sys.executable, '/nowhere/python'")
        said = notebook.run("import nbdist\n%load_ext nbdist\n%dist start -n 2 --device cpu")
        assert "StartError: The process that starts the ranks could not be started." in said
        assert "/nowhere/python: No such file" in said
        assert "Traceback" not in said
        assert Family(notebook.pid).processes == []
        notebook.run("sys.executable = real")
        assert "Started" in notebook.run("%dist start -n 2 --device cpu")

        said = notebook.run("%dist start -n 3")
        assert "ClusterError: A cluster is already running: 2 ranks on cpu, gloo." in said
        assert "%dist stop" in said
        assert "3.0" in notebook.on_ranks(SUM), "the first goes on"


# In the parent, and only there: torch's import takes until the file is there.
SLOW = """
import os, sys, time
def look(event, args):
    # importlib.import_module is not audited: what torch itself imports first.
    if event == "import" and args[0][:6] == "torch." and "nbdist.host.parent" in sys.orig_argv:
        while not os.path.exists({go!r}):
            time.sleep({sleep})
sys.addaudithook(look)
"""


def slow_launcher(folder: Path, monkeypatch: pytest.MonkeyPatch, sleep: float) -> LocalLauncher:
    """Return a launcher whose parent has begun an import that ends when `folder`/go is there."""
    site = site_folder(folder, SLOW.format(go=str(folder / "go"), sleep=sleep))
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(local, "HANGS_AFTER_S", 2.0)
    monkeypatch.setattr(patience, "_FIRST_WORD_S", 1.0)
    launcher = LocalLauncher(folder)
    launcher.start_soon("store", "store", {"address": "127.0.0.1"})
    return launcher


@pytest.mark.slow
def test_a_slow_import_of_torch_is_told_and_waited_for_while_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = slow_launcher(tmp_path, monkeypatch, sleep=0)  # it computes
    said: list[str] = []

    def say(sentence: str) -> None:
        said.append(sentence)
        if "interrupt" in sentence and len(said) == 3:  # after 4 s, longer than one may hang
            (tmp_path / "go").touch()

    try:
        assert "gpus" in launcher.ready(say)
    finally:
        launcher.close()
    assert re.fullmatch(
        r"Waiting for torch's import: \d+ s so far \(interrupt to give up\)\.", said[0]
    )


@pytest.mark.slow
def test_an_import_of_torch_that_hangs_ends_the_start_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = slow_launcher(tmp_path, monkeypatch, sleep=0.5)
    try:
        with pytest.raises(StartError, match="hangs in torch's import") as hung:
            launcher.ready(print)
    finally:
        launcher.close()
    assert "it has not computed for 2 s" in hung.value.why


ONE_GPU = """
import nbdist
from nbdist.client.cluster.launchers.local import LocalLauncher
found = LocalLauncher.ready
LocalLauncher.ready = lambda launcher, say: found(launcher, say) | {"gpus": 1}
%load_ext nbdist
"""


@pytest.mark.slow
@no_cuda
def test_who_shares_a_gpu_is_told_and_ranks_that_find_none_are_one_error(tmp_path: Path) -> None:
    with Notebook(tmp_path, CUDA_VISIBLE_DEVICES="") as notebook:
        notebook.run(ONE_GPU)
        said = notebook.run("%dist start -n 2")
        assert "2 ranks share 1 GPU, over gloo, because NCCL refuses two ranks on one GPU." in said
        assert "StartError: The ranks could not create their group." in said
        assert "Why: This build of torch is for the CPU alone." in said
        assert "Traceback" not in said
        assert_only_parent_left(notebook)


@pytest.mark.slow
@no_cuda
def test_a_start_without_a_gpu_that_can_be_used_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError, match=r"No GPU can be used here\.") as refused:
        nbdist.start(n=1, device="cuda")
    assert refused.value.why == (
        "This build of torch is for the CPU alone. (Torch not compiled with CUDA enabled)"
    )
    assert "install a build of torch for CUDA" in refused.value.do


@no_cuda
@pytest.mark.parametrize(
    "backend", [pytest.param("gloo", marks=pytest.mark.slow), "cpu:gloo,cuda:nccl"]
)
def test_a_rank_whose_first_cuda_call_fails_ends_the_start_with_its_reason(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # As where the driver counts a GPU that the ranks then cannot use.
    options = ClusterOptions(n=2, device="cuda", backend=backend, threads=1)
    monkeypatch.setattr(current, "choose_options", lambda *_, **__: options)
    with pytest.raises(StartError, match=r"The ranks could not create their group\.") as refused:
        nbdist.start(n=2, device="cuda")
    why, told, logs = refused.value.why.splitlines()
    assert why == "This build of torch is for the CPU alone."
    assert re.fullmatch(r" *rank \d: AssertionError: Torch not compiled with CUDA enabled", told)
    assert "The logs are in" in logs
    assert refused.value.do.startswith("install a build of torch for CUDA")


def test_an_address_that_is_not_of_this_machine_is_one_error(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path)
    try:
        # 203.0.113.0/24 is for documents (RFC 5737): nobody has it.
        with pytest.raises(StartError, match=r"store could not be started: .*annot assign"):
            launcher.start_soon("store", "store", {"address": "203.0.113.1"}).result(60)
    finally:
        launcher.close()


@pytest.mark.slow
def test_where_a_site_hook_runs_a_thread_fresh_interpreters_are_started_and_work(
    tmp_path: Path,
) -> None:
    site = site_folder(tmp_path, THREAD)
    with Notebook(tmp_path, PYTHONPATH=f"{site}:{ROOT}") as notebook:
        said = notebook.run("import nbdist\n%load_ext nbdist\n%dist start -n 2 --device cpu")
        assert "Starting new interpreters, which takes longer: 2 threads run" in said
        assert "3.0" in notebook.on_ranks(SUM)
        commands = [" ".join(p.cmdline()) for p in Family(notebook.pid).processes]
        assert sum("nbdist.engine.rank.boot" in c for c in commands) == 2
        family = Family(notebook.pid)
        notebook.keep_busy(2)
        os.kill(notebook.pid, signal.SIGKILL)
        family.assert_gone()
        assert notebook.keys == []


@pytest.mark.slow  # test_kernel_ends.py starts five
def test_eight_ranks_start_and_meet(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.start("-n 8 --device cpu")
        assert "36.0" in notebook.on_ranks(SUM)


def run_script(folder: Path, source: str) -> tuple[subprocess.Popen[str], Path]:
    script = folder / "script.py"
    script.write_text(source)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=folder,
        env=private_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process, folder / "temp"


SCRIPT = """
import nbdist
session = nbdist.start(n=2, device="cpu")
result = session.run("x = torch.ones(1); dist.all_reduce(x); x.item()")
print([result[rank].value for rank in range(2)])
"""


@pytest.mark.slow
def test_a_script_that_ends_without_stop_leaves_nothing(tmp_path: Path) -> None:
    process, temp = run_script(tmp_path, SCRIPT + "input() if False else None\n")
    said, _ = process.communicate(timeout=90)
    assert "[2.0, 2.0]" in said
    assert process.returncode == 0, said
    assert list(temp.glob("nbdist-*")) == []
    assert of_script(tmp_path) == []


FOR_RANKS = """
import torch
calls = [
    "log(a=1.0)", "loader([1, 2], global_batch=2)", "parallelize(torch.nn.Linear(1, 1), 'ddp')",
    "keep(x=None)", "save()", "restore()", "coverage()",
]
for call in calls:
    try:
        eval(f"nbdist.{call}")
    except nbdist.UsageError as error:
        print("REFUSED", error.what, error.do)
nbdist.current().run("nbdist.log(a=1.0)")
session.stop()
print("THEN", len(nbdist.loader([1, 2], global_batch=2)))
"""


@pytest.mark.slow
def test_a_script_with_a_session_is_told_that_what_is_for_ranks_is_run_there(
    tmp_path: Path,
) -> None:
    process, _ = run_script(tmp_path, SCRIPT + FOR_RANKS)
    said, _ = process.communicate(timeout=90)
    refused = [line for line in said.splitlines() if line.startswith("REFUSED")]
    assert refused[0] == (
        "REFUSED nbdist.log is for ranks, and this process has a session with them and is none. "
        'run it on the ranks: nbdist.current().run("nbdist.log(...)")'
    )
    assert len(refused) == 7, said
    assert all("is for ranks, and this process" in line for line in refused)
    assert "THEN 1" in said


@pytest.mark.slow  # as one that ends without stop
def test_a_script_that_raises_inside_the_session_leaves_nothing(tmp_path: Path) -> None:
    process, temp = run_script(
        tmp_path,
        "import nbdist\n"
        "with nbdist.start(n=2, device='cpu') as session:\n"
        "    print(session.world_size)\n"
        "    session.run('1 / 0')\n",
    )
    said, _ = process.communicate(timeout=90)
    assert "RankError" in said
    assert "ZeroDivisionError" in said
    assert process.returncode == 1
    assert list(temp.glob("nbdist-*")) == []
    assert of_script(tmp_path) == []


def test_a_script_ended_by_sigterm_leaves_nothing(tmp_path: Path) -> None:
    process, temp = run_script(tmp_path, SCRIPT + "import time\ntime.sleep(600)\n")
    assert process.stdout is not None
    with process:
        while "[2.0, 2.0]" not in (line := process.stdout.readline()):
            assert line, "the script ended early"
        family = Family(process.pid)
        process.terminate()
        family.assert_gone()
    assert list(temp.glob("nbdist-*")) == []


def of_script(folder: Path) -> list[str]:
    """Return the processes that work in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
