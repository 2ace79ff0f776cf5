"""Interrupts as Jupyter sends them: SIGINT to the kernel's whole process group."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from nbdist import ClusterError, RankError, Session
from nbdist.client.cells import interrupts
from tests.cluster.conftest import Kernel, Ran
from tests.cluster.test_faults import fail

WORK = "t = torch.ones(1); dist.all_reduce(t); int(t)"

STUCK = {
    "a loop in Python": "print('in', flush=True)\nwhile True: pass",
    "time.sleep": "import time\nprint('in')\ntime.sleep(600)",
    "a shell command": "print('in')\n!sleep 600",
    "a subprocess": "import subprocess\nprint('in')\nsubprocess.run(['sleep', '600'])",
    "a command of os.system, which shields its rank": (
        "import os\nprint('in')\nos.system('sleep 600')"
    ),
    "a rank that was stopped": """
import os, signal, time
if rank: os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
print('in')
dist.barrier()
""",
    "one rank while the other has finished": (
        "import time\nif rank:\n    print('in')\n    while True: time.sleep(0.1)"
    ),
    "top-level await": "import asyncio\nprint('in')\nawait asyncio.sleep(600)",
    "a loop beside an await": (
        "import asyncio\nawait asyncio.sleep(0)\nprint('in')\nwhile True: pass"
    ),
    "a loop below an await": (
        "import asyncio\nasync def f():\n    print('in')\n    while True: pass\nawait f()"
    ),
    "a wait in C++ beside an await": (
        "import asyncio\nawait asyncio.sleep(0)\nprint('in')\n"
        "dist.all_reduce(torch.ones(1)) if rank else None\nwhile True: pass"
    ),
    "all_reduce of one rank": "print('in')\ndist.all_reduce(torch.ones(1)) if rank else None",
    "all_reduce and a loop": (
        "print('in')\nif rank: dist.all_reduce(torch.ones(1))\nwhile True: pass"
    ),
    "a work's wait": (
        "print('in')\ndist.all_reduce(torch.ones(1), async_op=True).wait() if rank else None"
    ),
    "DDP backward": """
m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
l = m(torch.ones(4, 2)).sum()
print('in')
l.backward() if rank else None
""",
    "a finaliser, where Python drops the exception": """
import time
class Slow:
    def __del__(self):
        print("in")
        time.sleep(600)
slow = Slow()
del slow
while True: pass
""",
    "a DataLoader's workers": """
import time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i): time.sleep(1); return i
print('in')
for _ in torch.utils.data.DataLoader(Slow(), num_workers=2): pass
""",
}

# How a rank is stuck in these, it is in others, too: in C that Python interrupts, in a child, in a
# loop beside an await, in C++.
SLOW = (
    "time.sleep",
    "a subprocess",
    "a loop beside an await",
    "all_reduce and a loop",
    "a work's wait",
)

AWAITS = "import asyncio\nawait asyncio.sleep(0)\n"
TRAINING = """
m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
o = torch.optim.SGD(m.parameters(), lr=0.1)
print('in')
while True: o.zero_grad(); m(torch.ones(4, 2)).sum().backward(); o.step()
"""
ARE_EQUAL = """
mine = torch.cat([p.detach().flatten() for p in m.parameters()])
both = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(both, mine)
torch.equal(*both)
"""


def assert_interrupted(ran: Ran) -> None:
    assert ran.error is not None
    name, _, shown = ran.error
    assert name == "KeyboardInterrupt", shown
    assert "nbdist/" not in shown


def assert_usable(notebook: Kernel) -> None:
    ran = notebook.cell(WORK)
    assert ran.error is None, ran.error
    assert ran.text == "ranks 0-1 │ Out: 2"


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=name, marks=(pytest.mark.slow,) if name in SLOW else ())
        for name, code in STUCK.items()
    ],
)
def test_an_interrupt_ends_the_cell_and_the_next_one_runs(notebook: Kernel, code: str) -> None:
    notebook.cell("kept = rank + 1")
    assert_interrupted(notebook.cell(code, "--no-track", interrupt_after=["in"], timeout_s=30))
    assert_usable(notebook)
    assert "Out: 1" in notebook.cell("kept").text


@pytest.mark.parametrize("begins", ["", AWAITS], ids=["plain", "with an await"])
def test_an_interrupted_training_leaves_replicas_equal(notebook: Kernel, begins: str) -> None:
    code = begins + TRAINING
    ran = notebook.cell(code, "--no-track", interrupt_after=["in"], timeout_s=30)
    assert_interrupted(ran)
    assert_usable(notebook)  # and no alarm in its text
    assert "Out: True" in notebook.cell(ARE_EQUAL, "--no-track").text, ran


def test_an_interrupted_dataloader_leaves_no_worker_and_no_traceback_behind(
    notebook: Kernel,
) -> None:
    code = """
import time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i): time.sleep(0.01); return i
print('in')
for _ in torch.utils.data.DataLoader(Slow(), num_workers=2): pass
"""
    ran = notebook.cell(code, "--no-track", interrupt_after=["in"], timeout_s=30)
    assert_interrupted(ran)
    assert ran.text == "ranks 0-1 │ in"
    count = """
import psutil, time
workers = lambda: psutil.Process().children()
deadline = time.monotonic() + 20
while workers() and time.monotonic() < deadline: time.sleep(0.02)
workers()
"""
    assert notebook.cell(count, timeout_s=30).text == "ranks 0-1 │ Out: []"


def test_a_rank_in_one_long_call_is_named_and_keeps_its_variables_when_waited_for(
    notebook: Kernel,
) -> None:
    notebook.cell("kept = rank + 1")
    code = """
def crunch(seconds):
    import ctypes
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # holds on to Python, as much native code does
print('in', flush=True)
import time; time.sleep(0.3)
crunch(4.5) if rank else None
"""
    ran = notebook.cell(code, interrupt_after=["in"])
    assert_interrupted(ran)
    assert_usable(notebook)


def test_a_cell_that_catches_the_interrupt_ends_as_it_likes_but_is_interrupted(
    notebook: Kernel,
) -> None:
    code = """
try:
    print("in")
    while True: pass
except KeyboardInterrupt:
    print("saved")
"""
    ran = notebook.cell(code, interrupt_after=["in"])
    assert_interrupted(ran)
    assert "saved" in ran.text
    assert_usable(notebook)


def test_a_double_click_on_the_interrupt_costs_nothing(notebook: Kernel) -> None:
    notebook.cell("kept = rank + 1")
    code = "import time\nprint('in')\nwhile True: time.sleep(0.01)"

    ran = notebook.cell(code, interrupt_after=["in", "in"])

    assert_interrupted(ran)
    assert_usable(notebook)


def test_a_second_interrupt_ends_a_rank_that_ignores_the_first(notebook: Kernel) -> None:
    code = """
import time
print("in")
while True:
    try:
        while True: time.sleep(0.01)
    except KeyboardInterrupt:
        print("ignored")
"""
    # The first interrupt shows, after a while, what a second one would do.
    ran = notebook.cell(code, interrupt_after=["in", "interrupt again"])
    assert ran.error is not None
    assert "replaced by new processes" in ran.error[1]
    assert_usable(notebook)


def test_interrupting_again_and_again_never_breaks_the_session(notebook: Kernel) -> None:
    for _ in range(4):
        assert_interrupted(
            notebook.cell("print('in')\nwhile True: dist.barrier()", interrupt_after=["in"])
        )
    assert_usable(notebook)


def test_a_pull_of_something_slow_can_be_interrupted(notebook: Kernel) -> None:
    code = """
import time, pathlib
class Slow:
    def __reduce__(self):
        pathlib.Path("pulling").touch(); time.sleep(20); return (int, ())
slow = Slow()
"""
    notebook.cell(code)
    kernel_code = """
import threading, signal, os, time, pathlib
def later():
    while not pathlib.Path("pulling").exists(): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=later).start()
%dist pull slow -r 0
"""
    assert_interrupted(notebook.run(kernel_code, timeout_s=30))
    assert_usable(notebook)
    notebook.cell("del slow")  # a replacement of a later test would wait for its copy


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_is_interrupted_alone_also_where_it_waits_for_its_peer(
    session: Session, rank: int, tmp_path: Path
) -> None:
    inside = tmp_path / "inside"
    code = f"""
import pathlib, time
if rank == 1:
    pathlib.Path({str(inside)!r}).touch()
    dist.barrier()
for i in range(300):
    time.sleep(0.01)
dist.barrier()
"""

    def interrupt() -> None:
        while not inside.exists():
            time.sleep(0.05)
        [cell] = interrupts.here.entered
        assert cell.ask(rank)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(RankError) as raised:
            session.run(code, timeout_s=60)
    finally:
        thread.join()
    assert raised.value.failures[rank][0] == "KeyboardInterrupt"
    assert session.run(WORK).value_list == [2, 2]


def test_an_interrupt_between_cells_harms_nothing(notebook: Kernel) -> None:
    notebook.interrupt()
    assert_usable(notebook)


@pytest.mark.parametrize("static", ["0", "1"])
def test_why_a_rank_died_stays_when_an_interrupt_ends_the_cell(
    notebook: Kernel, static: str
) -> None:
    code = """
import os, pathlib, signal, threading, time
import nbdist
def once_it_is_dead():
    while 1 in nbdist.current()._cluster.living(): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
os.environ["NBDIST_STATIC"] = "{static}"
threading.Thread(target=once_it_is_dead).start()
shell = get_ipython()
shell.run_cell_magic("distributed", "--no-track", '''
import ctypes
if rank: ctypes.string_at(0)
while True: pass
''')
"""
    ran = notebook.run(code.replace("{static}", static), timeout_s=30)
    notebook.run("os.environ['NBDIST_STATIC'] = '0'")

    assert ran.error is not None
    name, _, shown = ran.error
    assert name == "KeyboardInterrupt", shown
    assert "1 of 2 failed by itself, not by the interrupt:" in shown
    assert "rank 1 (localhost, cpu) died: killed by SIGSEGV" in shown
    assert "Rank 1 was replaced by a new process" in shown
    assert "rank 1 wrote last:\nFatal Python error: Segmentation fault" in shown
    assert_usable(notebook)


def test_a_second_interrupt_kills_no_rank_that_was_only_waiting(notebook: Kernel) -> None:
    notebook.cell("import os\npid = os.getpid()")
    code = """
import signal, time
def be_deaf(seconds):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    time.sleep(seconds)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
print("in")
if rank: be_deaf(600)
try:
    dist.all_reduce(torch.ones(1))
except BaseException:
    be_deaf(4)  # on its way, as on a machine that is loaded
    raise
"""
    ran = notebook.cell(code, interrupt_after=["in", "interrupt again"])

    assert_interrupted(ran)
    assert ran.error is not None
    assert "Rank 1 was killed, because the interrupt did not stop it." in ran.error[1]
    assert "Rank 1 was replaced by a new process" in ran.error[1]
    assert "Rank 1 is still busy in be_deaf" in "".join(ran.live)
    assert notebook.cell("pid == os.getpid()").text.splitlines() == [
        "rank 0 │ Out: True",
        "rank 1 │ Out: False",
    ]
    assert_usable(notebook)


def test_the_traceback_of_a_rank_that_was_stopped_leaves_torch_out(session: Session) -> None:
    code = """
from torch.utils import _pytree
def stop(_): raise {error}
_pytree.tree_map(stop, [1])
"""
    stopped = fail(session, code.format(error="KeyboardInterrupt"))
    assert "_pytree.py" not in stopped
    assert "cell" in stopped.lower()
    assert "_pytree.py" in fail(session, code.format(error="ValueError"))


def test_an_interrupt_that_comes_when_its_cell_is_over_leaves_the_next_one_alone(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[], Future[bool]]] = []
    requests = session._cluster.requests
    interrupt = requests.interrupt

    def hold_up(rank: int, message_id: str) -> Future[bool]:
        late.append(lambda: interrupt(rank, message_id))
        if len(late) == 2:
            (tmp_path / "interrupted").touch()
        return Future()

    until = """
import pathlib, time
folder = pathlib.Path({folder!r})
(folder / f"{name} {{rank}}").touch()
while not (folder / {name!r}).exists(): time.sleep(0.01)
rank
"""
    monkeypatch.setattr(requests, "interrupt", hold_up)
    with pytest.raises(ClusterError, match="was interrupted"):
        session.run(until.format(folder=str(tmp_path), name="interrupted"), timeout_s=0.1)
    assert session.last is not None
    assert session.last.value_list == [0, 1]  # it had ended

    struck: list[bool] = []

    def let_go() -> None:
        while not all((tmp_path / f"struck {rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        struck.extend(send().result(30) for send in late)
        (tmp_path / "struck").touch()

    helper = threading.Thread(target=let_go)
    helper.start()
    after = session.run(until.format(folder=str(tmp_path), name="struck"), timeout_s=30)
    helper.join()

    assert after.value_list == [0, 1]
    assert struck == [False, False]


def test_an_interrupt_that_python_dropped_at_a_cells_end_leaves_the_next_one_alone(
    session: Session,
) -> None:
    dropped = """
import threading
Timer, may_strike, late = threading.Timer, threading.Event(), []
class Late(threading.Thread):
    def __init__(self, _seconds, strike, arguments):
        super().__init__()
        self.strike = lambda: strike(*arguments)
        late.append(self)
    def run(self):
        may_strike.wait()
        self.strike()
threading.Timer = Late
class Last:
    def __del__(self): raise KeyboardInterrupt
last = Last()
del last
len(late)
"""
    after = """
threading.Timer = Timer
may_strike.set()
for thread in late: thread.join()
rank
"""
    assert session.run(dropped).value_list == [1, 1]
    assert session.run(after).value_list == [0, 1]


def test_an_interrupt_after_a_cells_last_line_is_told_with_what_the_cell_has_made(
    session: Session,
) -> None:
    code = """
import signal
kernel = get_ipython().kernel
def end():
    del kernel._restore_input
    kernel._restore_input()
    signal.raise_signal(signal.SIGINT)
if rank == 0: kernel._restore_input = end
rank + 7
"""
    assert "KeyboardInterrupt" in fail(session, code)
    assert session.last is not None
    assert session.last.value_list == [7, 8]
    assert session.run("rank").value_list == [0, 1]


def test_who_waits_for_a_new_process_is_told_so(notebook: Kernel) -> None:
    ran = notebook.cell("import os, signal\nif rank: os.kill(os.getpid(), signal.SIGKILL)")
    assert any("Rank 1 died: being replaced ..." in text for text in ran.live)
    assert "being replaced" not in ran.text
    assert "rank 1 (localhost, cpu) died: killed by SIGKILL" in (ran.error or ("", "", ""))[2]
