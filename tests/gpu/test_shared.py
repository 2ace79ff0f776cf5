"""On one GPU that several ranks share: over gloo, and over an NCCL that allows it.

Kills, interrupts and failed assertions in kernels are real, and training goes on after each.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist.client.notebook import current
from nbdist.shared.errors import LayoutError, NBDistError
from tests.gpu.cells import LEARN, MARKS, STEP, assert_equal_parameters, assert_usable

pytestmark = MARKS

FIRST_BACKWARD = """
torch.manual_seed(0)
model = torch.nn.Linear(64, 8).to(device)
if wrap == "ddp":
    nbdist.parallelize(model, "ddp")
    wrapped = model
else:
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
torch.manual_seed(rank)
wrapped(torch.randn(32, 64, device=device)).square().mean().backward()
model.weight.grad.double().sum().item()
"""

VERIFY = """
proof = layout.verify((data, target), torch.nn.functional.mse_loss)
proof.ok, repr(proof)
"""


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
    """Wait until `condition()` is true.

    Raises:
        AssertionError: It did not become so within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.05)


@pytest.fixture
def trio() -> Iterator[nbdist.Session]:
    """Three ranks over gloo that have trained."""
    with nbdist.start(n=3, device="cuda", backend="gloo") as session:
        session.run(STEP)
        yield session


@pytest.fixture
def nccl_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[nbdist.Session]:
    """Two ranks over NCCL that have trained; skipped where it refuses two on one GPU."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    # Ranks have the environment of the process that forks them: here a new one.
    monkeypatch.setattr(current, "_launcher", None)
    try:
        with nbdist.start(n=2, device="cuda", backend="nccl") as session:
            session.run("x = torch.ones(1, device=device); dist.all_reduce(x); x.item()")
            session.run(STEP)
            yield session
    except NBDistError as error:
        if "Duplicate GPU detected" in str(error):
            pytest.skip("this NCCL refuses two ranks on one GPU")
        raise
    finally:
        if (launcher := current._launcher) is not None:
            atexit.unregister(launcher.close)
            launcher.close()


# -- DDP


@pytest.mark.parametrize("wrap", ["ddp", "DistributedDataParallel"])
@pytest.mark.parametrize(("n", "backend"), [(1, None), (2, "gloo")])
def test_the_first_backward_of_a_session_averages_gradients(
    n: int, backend: str | None, wrap: str
) -> None:
    with nbdist.start(n=n, device="cuda", backend=backend) as session:
        sums = session.run(FIRST_BACKWARD, params={"wrap": wrap}).value_list
    assert all(one == sums[0] != 0 for one in sums)


# -- what a start says, and what gloo cannot


def test_more_ranks_than_gpus_share_them_over_gloo_and_the_start_says_so() -> None:
    import torch

    gpus, said = torch.cuda.device_count(), list[str]()
    with nbdist.start(n=gpus + 1, say=said.append) as session:
        places = session.run("str(device)").value_list
        backends = session.run("dist.get_backend()").value_list
    (sentence,) = [line for line in said if "share" in line]
    assert sentence.startswith(f"{gpus + 1} ranks share {gpus} GPU")
    assert "over gloo" in sentence
    assert places == [f"cuda:{rank % gpus}" for rank in range(gpus + 1)]
    assert set(backends) == {"gloo"}


SENDS = {
    "send": "dist.send(x, 1) if rank == 0 else dist.recv(x, 0)",
    "isend": "(dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)).wait()",
    "recv from any": "dist.send(x, 1) if rank == 0 else dist.recv(x)",
    "batch": "[work.wait() for work in dist.batch_isend_irecv("
    "[dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, torch.empty_like(x), 1 - rank)]"
    ")]",
}


@pytest.mark.parametrize("tap", ["off", "counts", "full"])
def test_messages_of_a_gpu_are_refused_over_gloo_and_cost_no_rank(tap: str) -> None:
    with nbdist.start(n=2, device="cuda", backend="gloo", tap=tap) as session:
        session.run("x = torch.ones(4, device=device)")
        pids = session.run("import os; os.getpid()").value_list
        for code in SENDS.values():
            with pytest.raises(nbdist.RankError, match="of a tensor on the GPU was refused"):
                session.run(code)
        session.run("y = x.cpu(); dist.send(y, 1) if rank == 0 else dist.recv(y, 0)")
        assert session.run("os.getpid()").value_list == pids


def test_a_pipeline_on_a_shared_gpu_is_refused_before_the_model_changes() -> None:
    code = """
net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))).to(device)
before = [(name, id(p), p.device) for name, p in net.named_parameters()]
try:
    nbdist.parallelize(net, "pp=2")
except Exception as error:
    said = type(error).__name__, str(error)
said, before == [(name, id(p), p.device) for name, p in net.named_parameters()]
"""
    with nbdist.start(n=2, device="cuda", backend="gloo") as session:
        for (name, text), is_same in session.run(code).value_list:
            assert name == LayoutError.__name__
            assert "cannot run on a GPU over gloo; the model is as it was." in text
            assert is_same


# -- faults of ranks over gloo


def test_a_failed_assertion_in_a_kernel_is_told_and_costs_that_rank_alone(
    trio: nbdist.Session,
) -> None:
    pids = trio.run("import os; os.getpid()").value_list
    code = f"""
if rank == 1:
    table = torch.randn(10, 4, device=device)
    torch.nn.functional.embedding(torch.tensor([999999], device=device), table).sum().item()
{LEARN}
"""
    with pytest.raises(nbdist.RankError, match="ssert"):
        trio.run(code)
    assert_usable(trio)
    assert_equal_parameters(trio)
    after = trio.run("import os; os.getpid()").value_list
    assert [after[0], after[2]] == [pids[0], pids[2]]
    assert after[1] != pids[1]


def test_the_memory_of_a_killed_rank_is_free_again(trio: nbdist.Session) -> None:
    import torch

    def free() -> int:
        return torch.cuda.mem_get_info()[0]

    # So much that what others allocate meanwhile cannot hide it.
    held = free() // 4
    trio.run(f"held = torch.empty({held}, dtype=torch.uint8, device=device) if rank == 1 else None")
    before = free()
    with pytest.raises(nbdist.RankError, match="SIGKILL"):
        trio.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    wait_for(lambda: free() - before > held / 2, "the memory of a killed rank")
    assert_usable(trio)


# -- faults of ranks over NCCL


def test_two_ranks_of_nccl_train_as_one_process_does(nccl_pair: nbdist.Session) -> None:
    assert set(nccl_pair.run("dist.get_backend()").value_list) == {"nccl"}
    for is_ok, said in nccl_pair.run(VERIFY).value_list:
        assert is_ok, said
    assert_equal_parameters(nccl_pair)


def test_a_rank_of_nccl_that_raises_frees_its_peer_and_groups_get_new_communicators(
    nccl_pair: nbdist.Session,
) -> None:
    nccl_pair.run('pair = dist.new_group(backend="cpu:gloo,cuda:nccl")')
    add_up = """
on_gpu, on_cpu = torch.ones(2, device=device), torch.ones(2)
dist.all_reduce(on_gpu, group=pair)
dist.all_reduce(on_cpu, group=pair)
on_gpu.sum().item(), on_cpu.sum().item()
"""
    assert nccl_pair.run(add_up).value_list == [(4.0, 4.0)] * 2
    for group in ("None", "pair"):
        wait = f"dist.all_reduce(torch.ones(4, device=device), group={group})"
        with pytest.raises(nbdist.RankError, match="planted"):
            nccl_pair.run(
                f"if rank == 1: raise ValueError('planted')\n{wait}\ntorch.cuda.synchronize()"
            )
        assert nccl_pair.run(add_up).value_list == [(4.0, 4.0)] * 2
    assert_usable(nccl_pair)


def test_a_killed_rank_of_nccl_comes_back_with_what_the_other_holds(
    nccl_pair: nbdist.Session,
) -> None:
    with pytest.raises(nbdist.RankError, match="SIGKILL"):
        nccl_pair.run(
            "import os, signal\n"
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
            "x = torch.ones(4, device=device)\ndist.all_reduce(x)\nx.sum().item()"
        )
    assert_usable(nccl_pair)
    assert_equal_parameters(nccl_pair)


def test_an_interrupt_frees_a_rank_that_waits_for_a_collective_of_nccl(
    nccl_pair: nbdist.Session, tmp_path: Path
) -> None:
    code = f"""
import pathlib, time
pathlib.Path({str(tmp_path)!r}, f"is-in-{{rank}}").touch()
if rank == 0:
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    x.sum().item()
while True:
    time.sleep(0.01)
"""

    def interrupt() -> None:
        wait_for(lambda: len(list(tmp_path.glob("is-in-*"))) == 2, "both ranks")
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        nccl_pair.run(code)
    waiting.join()
    assert_usable(nccl_pair)
    assert_equal_parameters(nccl_pair)
