"""NCCL with one rank on one GPU: start, cell, DDP step, stop."""

from pathlib import Path

import psutil
import pytest

import nbdist

pytestmark = [
    pytest.mark.gpu,
    # Sockets of tornado and asyncio warn of each other's deprecations.
    *(
        pytest.mark.filterwarnings(f"ignore::{category}")
        for category in ("DeprecationWarning", "FutureWarning", "ResourceWarning")
    ),
]

WHERE = """
x = torch.ones(4, device=device)
dist.all_reduce(x)
y = torch.ones(4)
dist.all_reduce(y)
str(x.device), x.sum().item(), y.sum().item(), dist.get_backend(), torch.cuda.device_count() > 0
"""

STEP = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
layout = nbdist.parallelize(model.to(device), "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(64, 16, device=device)
target = data.sum(1, keepdim=True)
losses = []
for _ in range(5):
    loss = torch.nn.functional.mse_loss(model(data), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
losses
"""


def test_one_rank_with_nccl_starts_trains_recovers_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
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
    assert not psutil.pid_exists(line.pid)
