"""Scripts as they are, in cells: their own `init_process_group`, `%run`, twice in one session."""

import threading
from pathlib import Path

import pytest

from nbdist import ClusterError, Session
from tests.cluster.test_faults import fail

SUM = "_s = torch.ones(1); dist.all_reduce(_s); _s.item()"
SETUP = """
import os
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
dist.init_process_group("gloo", rank=rank, world_size=2)
"""
TENSOR_PARALLEL = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
alone = net(torch.ones(3, 4)).sum().item()
net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
opt = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=True)
out = net(torch.ones(3, 4)).sum()
out.backward(); opt.step()
cut = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
moved = (cut @ cut.t()).redistribute(placements=[Replicate()]).to_local().sum().item()
"""
SHARDED = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
for layer in model: fully_shard(layer)
fully_shard(model)
sgd = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.ones(2, 4)).sum(); loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    sgd.step(); sgd.zero_grad()
"""


@pytest.mark.parametrize(
    "call",
    [
        "dist.init_process_group()",
        "torch.distributed.init_process_group(backend='gloo')",
        "from torch.distributed import init_process_group; init_process_group('cpu:gloo')",
        "dist.init_process_group('gloo', 'env://', rank=rank, world_size=world_size)",
        "dist.init_process_group('GLOO', init_method='tcp://localhost:9', rank=rank, world_size=2)",
    ],
)
def test_a_script_that_makes_the_group_gets_the_one_there_is(session: Session, call: str) -> None:
    result = session.run(call)
    assert result[0].text.strip() == (
        "init_process_group: the ranks' own group is used (gloo, 2 ranks)."
    )
    assert result[1].text == ""
    assert session.run(SUM).value_list == [2.0, 2.0]


def test_a_timeout_of_its_own_is_said_not_to_be_taken(session: Session) -> None:
    said = session.run(
        "import datetime; dist.init_process_group(timeout=datetime.timedelta(seconds=7))"
    )[0].text
    assert "timeout 1800 s as %dist start set it" in said


CONTINUES = "init_process_group: rank 0 continues without rank 1, which cannot come."
WRITE = """
import os, time
from pathlib import Path
place = Path("written.txt")
if rank == 0:
    place.unlink(missing_ok=True)
dist.barrier()
for _ in range(2):
    if rank == 0:
        time.sleep(0.2); place.write_text(f"{_}")
    dist.init_process_group("gloo")
    _read = place.read_text() if place.exists() else ""
    assert _read == str(_), _read
    dist.barrier()
"""


def test_ranks_meet_where_they_make_the_group(session: Session, tmp_path: Path) -> None:
    session.run(WRITE, timeout_s=30)
    path = tmp_path / "meets.py"
    path.write_text(
        f"import os\nimport torch.distributed as dist\nrank = int(os.environ['RANK']){WRITE}"
    )
    session.run_script(path, [], timeout_s=30)


@pytest.mark.parametrize(
    ("ranks", "code", "said"),
    [
        ("0", "dist.init_process_group()", ""),
        ("all", "if rank == 0: dist.init_process_group()", ""),
        (
            "all",
            f"if rank == 0: dist.init_process_group()\n{SUM}\ndist.init_process_group()",
            CONTINUES,
        ),
        (
            "all",
            f"dist.init_process_group()\nif rank == 0: dist.init_process_group()\n{SUM}",
            CONTINUES,
        ),
        (
            "all",
            SETUP + "dist.destroy_process_group()" + SETUP + "dist.destroy_process_group()",
            "",
        ),
        ("all", "try: dist.init_process_group(rank=0)\nexcept Exception: pass", ""),
    ],
)
def test_a_rank_that_does_not_come_to_make_the_group_is_not_waited_for(
    session: Session, ranks: str, code: str, said: str
) -> None:
    result = session.run(code, ranks, timeout_s=30, track=False)
    assert said in result[0].text
    assert session.run(SUM).value_list == [2.0, 2.0]


LATE = """
import time
def wait():
    while True: time.sleep(0.01)
if rank == 1: wait()
dist.init_process_group()
"""


def test_a_wait_for_the_others_is_told_and_can_be_interrupted(session: Session) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            session.run(LATE, timeout_s=6)  # what is told before is in time on a busy machine
        except BaseException as error:
            raised.append(error)

    runner = threading.Thread(target=run)
    runner.start()
    told = ""
    while not ("s in init_process_group, line 5 for rank 1" in told and "wait (line 3)" in told):
        runner.join(0.05)
        assert runner.is_alive(), told
        told = str(session.stacks())
    runner.join(60)
    (error,) = raised
    assert isinstance(error, ClusterError)  # the cell's limit, by which it is interrupted
    assert "rank 0 waits for it in init_process_group, line 5" in error.why
    assert session.run(SUM).value_list == [2.0, 2.0]


def test_a_wait_for_the_others_ends_in_time_or_with_a_fault(
    session: Session, tmp_path: Path
) -> None:
    told = fail(
        session,
        "import datetime, os, time\n"
        "from pathlib import Path\n"
        f"late = Path({str(tmp_path / 'late')!r})\n"
        "if rank == 0:\n"
        "    try: dist.init_process_group(timeout=datetime.timedelta(seconds=0.5))\n"
        "    finally: late.touch()\n"
        "while not os.access(late, os.F_OK): time.sleep(0.01)",
    )
    assert "rank 1 did not come to init_process_group." in told
    assert "rank 0 has waited 0.5 s there" in told
    told = fail(session, "if rank == 1: 1 / 0\ndist.init_process_group()")
    assert "ZeroDivisionError" in told
    assert "rank 0 was released while waiting in init_process_group" in told
    assert session.run(SUM).value_list == [2.0, 2.0]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("dist.init_process_group('nccl')", "backend nccl, and the group has gloo"),
        ("dist.init_process_group(world_size=4, rank=rank)", "world_size 4, and the group has 2"),
        ("dist.init_process_group(rank=0, world_size=2)", "rank 0, and the group has 1"),
    ],
)
def test_a_script_that_asks_for_another_group_is_told_what_differs(
    session: Session, call: str, why: str
) -> None:
    told = fail(session, call)
    assert "init_process_group asks for another group than the one that these ranks have." in told
    assert f"it asks for {why}" in told
    assert session.run(SUM).value_list == [2.0, 2.0]


def test_a_script_may_set_up_and_clean_up_in_a_loop(session: Session) -> None:
    body = "\n".join(f"    {line}" for line in SETUP.strip().split("\n"))
    session.run(f"for _ in range(3):\n{body}\n    {SUM}\n    dist.destroy_process_group()")
    assert session.run(SUM).value_list == [2.0, 2.0]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(TENSOR_PARALLEL, id="tp", marks=pytest.mark.slow),
        pytest.param(SHARDED, id="fsdp2"),
    ],
)
def test_dtensors_work_again_after_the_group_was_destroyed_and_scaled(
    session: Session, program: str
) -> None:
    for _ in range(2):
        session.run(f"{SETUP}{program}dist.destroy_process_group()", track=False)
    if program == TENSOR_PARALLEL:
        values = session.run("abs(out.item() - alone) < 1e-5, moved").value_list
        assert values == [(True, 400.0)] * 2
    session.scale(3)
    session.scale(2)
    session.run(program, track=False)


SCRIPT = """
import argparse, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
parser = argparse.ArgumentParser(); parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--fail-at", type=int, default=-1); parser.add_argument("--exit", type=int)
def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        if step == args.fail_at and dist.get_rank() == 1: raise ValueError("a broken sample")
        model(torch.ones(2, 4)).sum().backward(); opt.step(); opt.zero_grad()
        print("step", step)
    dist.destroy_process_group()
    if args.exit is not None: sys.exit(args.exit)
    return model.module.weight.sum().item()
if __name__ == "__main__":
    seen = "before"
    weight = main(parser.parse_args())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training script, as people have one before they have a notebook."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_training_script_runs_twice_and_leaves_its_names(session: Session, script: Path) -> None:
    for _ in range(2):
        said = session.run(f"%run {script} --steps 2", track=False)[1].text
        assert said.split() == ["step", "0", "step", "1"]
    first, second = session.run("weight").value_list
    assert first == second


def test_what_a_script_raises_ends_the_cell_and_frees_the_others(
    session: Session, script: Path
) -> None:
    told = fail(session, f"%run {script} --fail-at 1")
    assert "rank 1 (step 1)" in told or "rank 1" in told
    assert "ValueError: a broken sample" in told
    assert "train.py, line 12" in told
    assert session.run("seen").value_list == ["before"] * 2
    assert session.run(SUM).value_list == [2.0, 2.0]


def test_a_script_that_exits_with_an_error_fails_the_cell(session: Session, script: Path) -> None:
    assert "sys.exit(3)" in fail(session, f"%run {script} --exit 3")
    session.run(f"%run {script} --exit 0", track=False)
    session.run(f"%run -e {script} --exit 3", track=False)


def test_a_module_that_raises_fails_the_cell(session: Session, script: Path) -> None:
    where = f"import sys; sys.path.insert(0, {str(script.parent)!r})\n"
    told = fail(session, where + "%run -m train -- --fail-at 0")
    assert "ValueError: a broken sample" in told


def test_an_error_that_is_shown_and_ends_no_cell_is_seen(session: Session) -> None:
    shown = session.run(
        "try: 1 / 0\nexcept ZeroDivisionError: get_ipython().showtraceback()\nprint('went on')"
    )[0].text
    assert "ZeroDivisionError" in shown
    assert shown.index("ZeroDivisionError") < shown.index("went on")
    nested = session.run("get_ipython().run_cell('[][1]'); print('went on')")[1].text
    assert "IndexError" in nested
    told = fail(session, "1 / 0")
    assert told.count("ZeroDivisionError: division by zero") == 2  # heading and traceback


def test_a_breakpoint_says_what_to_do_instead(session: Session) -> None:
    assert "breakpoint() cannot ask from a rank" in fail(session, "breakpoint()")
    session.run("import os; os.environ['PYTHONBREAKPOINT'] = '0'; breakpoint()")
    session.run("del os.environ['PYTHONBREAKPOINT']")
