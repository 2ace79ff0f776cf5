"""Machines in trouble: each trouble is one clear message, and no rank's state is lost for it.

Two notebooks: one whose cluster goes on through everything, one whose starts fail. Full disks are
small file systems that the first one's kernel, in a mount namespace of its own, has to itself.
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import psutil
import pytest

from tests.lifecycle.kernels import Notebook, listening, wait_for

SUM = "x = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nx.item()"
MOUNTED = (
    "mkdir -m 700 -p .nbdist/logs && mount -t tmpfs -o size=2m none .nbdist/logs"
    ' && mount -t tmpfs -o size=24m none /dev/shm && exec "$@"'
)


def may_mount() -> bool:
    unshare = shutil.which("unshare")
    command = [str(unshare), "--mount", "sh", "-c", "mount -t tmpfs none /dev/shm"]
    return unshare is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """A port of loopback that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, taken: int) -> Iterator[Notebook]:
    """A cluster of two ranks that hold something, and hold it to the end."""
    folder = tmp_path_factory.mktemp("trouble")
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken)}
    notebook = Notebook(folder, **environment)
    if may_mount():
        argv = notebook.argv
        argv[:0] = ["unshare", "--mount", "sh", "-c", MOUNTED, "sh"]
    with notebook:
        notebook.start()
        notebook.on_ranks("kept = rank + 10")
        yield notebook
        assert_whole(notebook)


def assert_whole(notebook: Notebook) -> None:
    said = notebook.on_ranks(f"print('kept', kept)\n{SUM}")
    assert "kept 10" in said, said
    assert "kept 11" in said, said
    assert "3.0" in said, said


def needs_mounts(notebook: Notebook) -> None:
    if notebook.argv[0] != "unshare":
        pytest.skip("this user may not mount file systems")


def test_a_rank_that_is_stopped_is_waited_for_and_not_declared_dead(notebook: Notebook) -> None:
    pid = notebook.pids()["rank 1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        notebook.send(
            "%%distributed\nimport pathlib, time\npathlib.Path(f'at-{rank}').touch()\n"
            "dist.barrier()\npathlib.Path(f'through-{rank}').touch()"
        )
        wait_for(lambda: (notebook.folder / "at-0").exists(), "rank 0 to come to the barrier")
        assert not (notebook.folder / "at-1").exists()
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: (notebook.folder / "through-1").exists(), "rank 1 to go on")
    assert notebook.pids()["rank 1"] == pid
    assert "dead" not in notebook.run("%dist status")
    assert_whole(notebook)


def test_a_full_disk_under_the_logs_stops_no_cell(notebook: Notebook) -> None:
    needs_mounts(notebook)
    notebook.run(
        "try:\n    open('.nbdist/logs/hog', 'wb').write(bytes(4 << 20))\n"
        "except OSError as error:\n    print(error)"
    )
    try:
        said = notebook.on_ranks("for i in range(20_000): print('line', i, 'x' * 200)\nrank + 70")
        assert "70" in said
        assert "71" in said
        assert "the whole is kept: nowhere, because the disk of the logs is full" in said
        assert "Logging error" not in said
        said = notebook.on_ranks("1 / 0")
        assert "ZeroDivisionError" in said
        said = notebook.on_ranks("!echo from a shell")
        assert "Traceback" not in said, said
        assert_whole(notebook)
    finally:
        notebook.run("import os; os.unlink('.nbdist/logs/hog')")
    assert "from a shell" in notebook.on_ranks("!echo from a shell")


def test_the_doctor_sees_the_machine_and_the_cluster_that_runs(notebook: Notebook) -> None:
    said = notebook.run("%dist doctor")
    assert "2 ranks, all of them respond" in said, said
    assert "events.jsonl" in said
    assert "fit this nbdist" in said
    if notebook.argv[0] == "unshare":
        assert "!!  /dev/shm" in said


LOAD = """
loader = torch.utils.data.DataLoader(torch.zeros(64, 1 << 17), batch_size=16, num_workers=2)
print("batches", sum(1 for _ in loader))
"""


@pytest.mark.parametrize("left_bytes", [0, 2 << 20], ids=["full", "fuller than a batch"])
def test_a_full_dev_shm_is_named_with_what_to_do(notebook: Notebook, left_bytes: int) -> None:
    needs_mounts(notebook)
    notebook.run(
        "import os, shutil\n"
        f"free = shutil.disk_usage('/dev/shm').free - {left_bytes}\n"
        "open('/dev/shm/hog', 'wb').write(bytes(free))"
    )
    try:
        said = notebook.on_ranks(LOAD)
        assert "RankError" in said, said
        assert "Do:  /dev/shm is full" in said, said
        assert "num_workers=0" in said
        assert_whole(notebook)
    finally:
        notebook.run("import os; os.unlink('/dev/shm/hog')")


def test_a_rank_without_file_descriptors_fails_its_cell_and_goes_on(notebook: Notebook) -> None:
    said = notebook.on_ranks(
        "import os, resource\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/dev/fd')) + 20, hard))\n"
        "files = []\n"
        "try:\n    while True: files.append(open('/dev/null'))\n"
        "finally:\n    full = len(files)",
        "-r 1",
    )
    assert "OSError: [Errno 24] Too many open files" in said
    # It holds them still: cells, requests and the group need none.
    assert_whole(notebook)
    said = notebook.on_ranks("1 / 0")
    assert "ZeroDivisionError" in said
    assert "idle" in notebook.run("%dist status")
    notebook.on_ranks(
        "for file in files: file.close()\nresource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))",
        "-r 1",
    )
    assert_whole(notebook)


def test_torchs_own_functions_are_put_back_after_a_fault_and_that_is_said(
    notebook: Notebook,
) -> None:
    said = notebook.on_ranks("dist.is_initialized = lambda: False\n1 / 0", "-r 1")
    assert "ZeroDivisionError" in said
    own = "torch.distributed: torch's own is_initialized put back, which a cell had replaced"
    assert own in said, said
    assert_whole(notebook)


def test_the_port_of_masters_that_is_taken_is_not_ours(notebook: Notebook, taken: int) -> None:
    said = notebook.on_ranks("import os\nprint(os.environ['MASTER_PORT'])")
    assert str(taken) not in said


JUMP = """
import time
real, real_ns = time.time, time.time_ns
away = 0
time.time = lambda: real() + away
time.time_ns = lambda: real_ns() + int(away * 1e9)
try:
    for step, away in enumerate((0, 3600, -3600, 0, 7200, -7200)):
        nbdist.log(number=float(step))
        dist.barrier()
finally:
    time.time, time.time_ns = real, real_ns
"""


@pytest.mark.slow
def test_clocks_that_jump_disturb_neither_records_nor_runs(notebook: Notebook) -> None:
    said = notebook.on_ranks(JUMP, "--run jumping")
    assert "Error" not in said, said
    said = notebook.run(
        "import json, pathlib\n"
        "text = [json.loads(l) for p in pathlib.Path('.nbdist/spool').glob('*/ops.jsonl')"
        " for l in p.read_text().splitlines()]\n"
        "rows = [row[2] for row in text if isinstance(row, list)]\n"
        "print([row['number'] for row in rows if 'number' in row])\n"
        "begin, = (o for o in text if isinstance(o, dict) and o.get('op') == 'begin')\n"
        "end, = (o for o in text if isinstance(o, dict) and o.get('op') == 'end')\n"
        "print(end['time_ms'] >= begin['time_ms'])"
    )
    assert "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]" in said, said
    assert "True" in said
    assert_whole(notebook)


# -- starts that fail


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("starts")) as notebook:
        notebook.run("import nbdist, os, resource, sys\n%load_ext nbdist")
        yield notebook


@pytest.fixture
def unstarted(loaded: Notebook) -> Iterator[Notebook]:
    """The kernel without a cluster, whatever the test before has left."""
    yield loaded
    loaded.run(
        "from nbdist.client.notebook import current\n"
        "if current._current: current._current.stop()\n"
        "if current._launcher: current._launcher.close()"
    )


def start(notebook: Notebook) -> str:
    return notebook.run("%dist start -n 2 --device cpu")


def assert_nothing_is_left(notebook: Notebook) -> None:
    children = psutil.Process(notebook.pid).children(recursive=True)
    wait_for(lambda: not listening(children), f"the sockets of {children} to be closed")
    assert notebook.keys == []


def module_folder(notebook: Notebook, name: str, source: str) -> Path:
    folder = Path(mkdtemp(dir=notebook.folder))
    (folder / f"{name}.py").write_text(source)
    return folder


def test_a_torch_that_cannot_be_imported_is_named_by_the_start(unstarted: Notebook) -> None:
    source = "raise ImportError('libcudart.so.13: cannot open shared object file')"
    folder = module_folder(unstarted, "torch", source)
    unstarted.run(f"sys.path.insert(0, {str(folder)!r})")
    said = start(unstarted)
    unstarted.run("del sys.path[0]")
    assert "StartError: The parent process that starts the ranks has ended." in said, said
    assert "ImportError: libcudart.so.13" in said
    assert f"{folder}/torch.py is imported in place of the installed torch: rename it." in said
    assert "%dist doctor" in said
    assert "Traceback" not in said.partition("Why:")[0]
    assert_nothing_is_left(unstarted)


BROKEN_RANK = """
import os, sys, threading, time
threading.Thread(target=time.sleep, args=[600], daemon=True).start()  # so that nobody forks
if "nbdist.engine.rank.boot" in sys.orig_argv:
    os.write(2, b"this Python has lost its encodings\\n")
    os._exit(4)
"""


@pytest.mark.slow
def test_a_rank_whose_python_is_broken_is_named_by_the_start(unstarted: Notebook) -> None:
    folder = module_folder(unstarted, "sitecustomize", BROKEN_RANK)
    unstarted.run(f"sys.path.insert(0, {str(folder)!r})")
    said = start(unstarted)
    unstarted.run("del sys.path[0]")
    assert "StartError: Rank" in said, said
    assert "ended while starting" in said
    assert "this Python has lost its encodings" in said
    assert_nothing_is_left(unstarted)


# Whoever is forked leads its session late, as on a busy machine: one that is ended before is, too.
LATE = """
import os, pathlib, sys, time
if "nbdist.host.parent" in sys.orig_argv:
    import ipyparallel.util as util
    real, often = util.select_random_ports, pathlib.Path({often!r})
    lead = os.setsid
    os.setsid = lambda: time.sleep(0.5) or lead()

    def taken_meanwhile(n):
        left = int(often.read_text())
        often.write_text(str(left - 1))
        return [{port}] if left > 0 else real(n)

    util.select_random_ports = taken_meanwhile
"""


LATE_HEART = """
import pathlib, sys
if "nbdist.host.parent" in sys.orig_argv:
    import ipyparallel.controller.heartmonitor as heart
    real, often = heart.bind, pathlib.Path({often!r})

    def taken_meanwhile(socket, url, **keys):
        left = int(often.read_text())
        often.write_text(str(left - 1))
        return real(socket, "tcp://127.0.0.1:{port}" if left > 0 else url, **keys)

    heart.bind = taken_meanwhile
"""


@pytest.mark.parametrize(
    ("late", "times"),
    [
        pytest.param(LATE, 1, id="once", marks=pytest.mark.slow),
        pytest.param(LATE, 100, id="always"),
        pytest.param(LATE_HEART, 1, id="heart's", marks=pytest.mark.slow),
    ],
)
def test_a_port_that_another_takes_meanwhile_is_tried_again_and_then_named(
    unstarted: Notebook, taken: int, late: str, times: int
) -> None:
    often = unstarted.folder / f"often-{times}-{len(late)}"
    often.write_text(str(times))
    source = late.format(often=str(often), port=taken)
    folder = module_folder(unstarted, "sitecustomize", source)
    unstarted.run(f"sys.path.insert(0, {str(folder)!r})")
    said = start(unstarted)
    unstarted.run("del sys.path[0]")
    if times == 1:
        assert "Started" in said, said
        unstarted.run("%dist stop")
    else:
        assert "StartError: ipyparallel's controller has ended" in said, said
        assert "Address already in use" in said
    assert_nothing_is_left(unstarted)


@pytest.mark.slow
def test_a_kernel_without_file_descriptors_starts_nothing_and_later_does(
    unstarted: Notebook,
) -> None:
    unstarted.run(
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))\n"
        "files = []\n"
        "try:\n    while True: files.append(os.open('/dev/null', os.O_RDONLY))\n"
        "except OSError:\n    for _ in range(3): os.close(files.pop())"
    )
    said = start(unstarted)
    unstarted.run(
        "for file in files: os.close(file)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))"
    )
    assert "Error" in said, said
    assert "oo many open files" in said
    assert "ulimit -n 4096" in said
    assert_nothing_is_left(unstarted)
    assert "Started" in start(unstarted)
    assert "3.0" in unstarted.on_ranks(SUM)


@pytest.mark.slow
def test_a_kernel_whose_files_are_limited_lets_ranks_have_what_it_may_give(
    unstarted: Notebook,
) -> None:
    # Its first start may be long ago, and its parent is another process by now.
    unstarted.run("%dist stop")
    start(unstarted)
    unstarted.run(
        "%dist stop\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/dev/fd')) + 2, hard))\n"
        "os.environ['PYTHONWARNINGS'] = 'error'"
    )
    said = start(unstarted)
    unstarted.run("del os.environ['PYTHONWARNINGS']")
    assert "Started" in said, said
    assert "3.0" in unstarted.on_ranks(SUM)
    unstarted.run("%dist stop\nnbdist.client.notebook.current._launcher.close()")
    unstarted.run("resource.setrlimit(resource.RLIMIT_NOFILE, (80, hard))")
    assert "Started" in start(unstarted)
    limit = "import resource\nprint('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    assert "limit 80" not in unstarted.on_ranks(limit)
    unstarted.run("resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))")
