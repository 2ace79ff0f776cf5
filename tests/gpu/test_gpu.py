"""On one GPU: NCCL with one rank, and gloo with several ranks that share it; faults on both.

Interrupts and kills are real, and training goes on after each.
"""

import gzip
import json
import os
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest

import nbdist
from tests.gpu.cells import LEARN, MARKS, STEP, assert_equal_parameters, assert_usable

pytestmark = MARKS

WHERE = """
x = torch.ones(4, device=device)
dist.all_reduce(x)
y = torch.ones(4)
dist.all_reduce(y)
str(x.device), x.sum().item(), y.sum().item(), dist.get_backend(), torch.cuda.device_count() > 0
"""


@pytest.fixture(params=[(1, None), (3, "gloo")], ids=["nccl", "gloo on a shared GPU"])
def session(request: pytest.FixtureRequest) -> Iterator[nbdist.Session]:
    """One rank over NCCL, or three over gloo whose tensors lie on one GPU."""
    n, backend = request.param
    with nbdist.start(n=n, device="cuda", backend=backend) as session:
        session.run(STEP)
        yield session


def test_one_rank_with_nccl_starts_trains_recovers_and_stops() -> None:
    with nbdist.start(n=1, device="cuda") as session:
        place, on_gpu, on_cpu, backend, has_gpu = session.run(WHERE)[0].value
        assert (place, on_gpu, on_cpu, has_gpu) == ("cuda:0", 4.0, 4.0, True)
        assert "nccl" in backend or backend == "undefined"  # one backend a kind of device
        losses = session.run(STEP)[0].value
        assert losses[-1] < losses[0]
        (pulled,) = session.pull("data")
        assert str(pulled.device) == "cpu"
        with pytest.raises(nbdist.RankError, match="ZeroDivisionError"):
            session.run("1 / 0")
        assert session.run("float(model[0].weight.sum()) == float(model[0].weight.sum())").ok
        (line,) = session.status().ranks
        assert line.device == "cuda:0"
        assert line.memory_bytes > 0
        gpu = line.gpu
        assert 0 < gpu["allocated_bytes"] <= gpu["reserved_bytes"] < gpu["device_total_bytes"]
        assert gpu["allocated_bytes"] <= gpu["peak_bytes"]
        assert "GPU allocated" in str(session.status())
    assert not psutil.pid_exists(line.pid)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_rank_that_raises_in_a_step_costs_no_state(session: nbdist.Session, place: str) -> None:
    last = session.world_size - 1
    register = {
        "forward": "model[0].register_forward_hook",
        "backward": "model[0].register_full_backward_hook",
    }[place]
    fail = (
        "def fail(*_):\n    raise ValueError('planted')\n"
        f"handle = {register}(fail) if rank == {last} else None\n"
        f"try:\n    {LEARN.strip().replace(chr(10), chr(10) + '    ')}\n"
        "finally:\n    handle and handle.remove()"
    )
    with pytest.raises(nbdist.RankError, match="planted"):
        session.run(fail)
    assert_usable(session)


def test_an_interrupt_stops_work_on_the_gpu(session: nbdist.Session) -> None:
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        session.run("while True: (data @ data.T).sum().item()")
    assert_usable(session)


def test_a_rank_that_waits_for_one_that_left_is_freed() -> None:
    with nbdist.start(n=3, device="cuda", backend="gloo") as session:
        session.run(STEP)
        with pytest.raises(nbdist.RankError, match="finished the cell"):
            session.run("if rank: dist.all_reduce(torch.ones(4, device=device))")
        assert_usable(session)


def test_a_killed_rank_comes_back_with_what_the_others_hold() -> None:
    with nbdist.start(n=3, device="cuda", backend="gloo") as session:
        session.run(STEP)
        with pytest.raises(nbdist.RankError, match="SIGKILL"):
            session.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
        assert_usable(session)
        assert_equal_parameters(session)


@pytest.mark.parametrize(("n", "backend"), [(1, "nccl"), (2, "gloo")])
def test_a_profile_holds_the_kernels_of_each_rank(n: int, backend: str) -> None:
    with nbdist.start(n=n, device="cuda", backend=backend) as session:
        session.run(STEP, profile="2", track=False)
        profile = session.profile
        assert profile is not None
        assert profile.trace is not None, profile.said
        events = json.loads(gzip.decompress(profile.trace.read_bytes()))["traceEvents"]
        kernels = {e["pid"] for e in events if e.get("cat") == "kernel"}
        assert {pid // 100 for pid in kernels} == set(range(n))
        assert all(pid % 100 for pid in kernels)  # beside the rank's own process


@pytest.mark.parametrize(
    "wrap", ["LocalSGD(sgd, every=2)", "DiLoCo(sgd, every=2)", "AsyncSGD(sgd)"]
)
def test_ranks_that_train_apart_on_gpus_end_equal(session: nbdist.Session, wrap: str) -> None:
    end = "optimizer.finish()" if wrap.startswith("AsyncSGD") else "optimizer.end_round()"
    code = f"""
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
model.to(device)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = nbdist.{wrap}
losses = []
"""
    session.run(code + LEARN + end)
    sums = session.run("[float(p.double().sum()) for p in model.parameters()]").value_list
    assert all(one == sums[0] for one in sums)
    assert session.run("{p.device.type for p in model.parameters()} == {'cuda'}").ok


def test_a_layout_in_low_precision_is_proven_on_gpus(session: nbdist.Session) -> None:
    code = """
from torch.nn import functional as F
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
spread = nbdist.parallelize(net.to(device), "ddp", nbdist.Precision("bf16"))
torch.manual_seed(rank)
x, y = torch.randn(8, 16, device=device), torch.randint(3, (8,), device=device)
proof = spread.verify((x, y), F.cross_entropy)
"""
    session.run(code)
    assert session.run("proof.ok, repr(proof)")[0].value[0]


OUT_OF_RANGE = """
table = torch.nn.Embedding(10, 4, device=device)
index = torch.full((512,), 10_000 if rank == world_size - 1 else 1, device=device)
table(index).sum().item()
dist.barrier()
"""


def test_an_index_out_of_range_is_named_with_its_line_and_training_goes_on_as_advised(
    session: nbdist.Session,
) -> None:
    with pytest.raises(nbdist.RankError) as caught:
        session.run(OUT_OF_RANGE, timeout_s=60)
    told = str(caught.value)
    assert caught.value.why.startswith("An index is out of range in an embedding"), told
    assert "Assertion `" in told
    assert ", line 4" in told
    assert "CUDA_LAUNCH_BLOCKING" not in told
    assert "frame #" not in told
    if "%dist restart" in caught.value.do:  # it has raised, and lives without its GPU
        session.restart(str(session.world_size - 1))
    assert len(session.run(STEP, timeout_s=60).value_list) == session.world_size
