"""On one GPU: CUDA graphs, by hand and by torch, on a rank that is watched as any other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import nbdist
from tests.gpu.cells import MARKS, STEP, assert_usable

pytestmark = MARKS

# torch's own recipe ("Whole-network capture" in its notes on CUDA), as users copy it.
CAPTURE = """
import time
from torch.nn import functional as F

def graph(mode, wait_s, replays=20):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    opt = torch.optim.SGD(net.to(device).parameters(), lr=0.1)
    x, y = torch.randn(32, 64, device=device), torch.randint(0, 8, (32,), device=device)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            opt.zero_grad(set_to_none=True)
            first = F.cross_entropy(net(x), y)
            first.backward()
            opt.step()
    torch.cuda.current_stream().wait_stream(beside)
    captured = torch.cuda.CUDAGraph()
    opt.zero_grad(set_to_none=True)
    with torch.cuda.graph(captured, capture_error_mode=mode):
        time.sleep(wait_s)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
    steps = []
    for _ in range(replays):
        captured.replay()
        steps.append(loss.item())
    torch.randn(8, device=device).sum().item()  # fails for good after a capture that was spoilt
    return steps
"""

EAGER = """
def eager(steps):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    opt = torch.optim.SGD(net.to(device).parameters(), lr=0.1)
    x, y = torch.randn(32, 64, device=device), torch.randint(0, 8, (32,), device=device)
    losses = []
    for _ in range(steps):
        opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses
"""

GRAPHED = """
def graphed(steps):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    net = net.to(device)
    x, y = torch.randn(32, 64, device=device), torch.randint(0, 8, (32,), device=device)
    net = torch.cuda.make_graphed_callables(net, (torch.randn_like(x),))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses
"""

COMPILED = """
def compiled(steps):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    net = net.to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.randn(32, 64, device=device), torch.randint(0, 8, (32,), device=device)
    fast = torch.compile(net, mode="reduce-overhead")
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(fast(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses
"""


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbdist.Session]:
    """One rank over NCCL, which has trained and is watched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("graphs"))
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
        with nbdist.start(n=1, device="cuda") as session:
            session.run(CAPTURE + EAGER + GRAPHED + COMPILED)
            session.run(STEP)
            yield session


# Records leave a rank each 0.5 s and its GPU is asked each second, on other threads: in a capture
# of 1.5 s both have their turns, which "global" takes amiss where they call CUDA.
@pytest.mark.parametrize("wait_s", [0, 1.5])
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_step_captured_by_hand_trains_as_the_same_steps_do(
    rank: nbdist.Session, mode: str, wait_s: float
) -> None:
    captured = rank.run(f"graph({mode!r}, {wait_s})")[0].value
    # Three steps warm up; the capture itself computes nothing.
    assert captured == pytest.approx(rank.run("eager(23)")[0].value[3:], rel=1e-3)
    assert_usable(rank)


def test_graphed_callables_train_as_the_model_does(rank: nbdist.Session) -> None:
    assert rank.run("graphed(10)")[0].value == pytest.approx(
        rank.run("eager(10)")[0].value, rel=1e-3
    )
    assert_usable(rank)


@pytest.mark.timeout(600)  # the compiler's first time on a machine
def test_a_model_compiled_into_graphs_trains_as_the_model_does(rank: nbdist.Session) -> None:
    pytest.importorskip("triton", reason="torch.compile needs triton on a GPU")
    fast = rank.run("compiled(10)", timeout_s=500)[0].value
    assert fast == pytest.approx(rank.run("eager(10)")[0].value, rel=1e-2)
    assert_usable(rank)
