"""Ten minutes of training on four ranks with a random fault every five seconds.

    NBDIST_SOAK_S=60 pytest -m soak -s tests/cluster/test_soak.py

Shows that no fault costs the session, that nothing grows, and what the faults cost in steps.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import nbdist
from nbdist import Session
from nbdist.client.cluster.events import read_events
from nbdist.client.notebook.arguments import FAULTS
from nbdist.client.session import chaos_report
from nbdist.client.session.chaos import ChaosPlan
from tests.cluster.conftest import ROOT

SECONDS = float(os.environ.get("NBDIST_SOAK_S", "600"))
FREE_SECONDS = max(10.0, SECONDS / 10)  # without faults: once before, once after
EVERY_S = 5.0
ENOUGH_STEPS = 0.8
MANY = 1_000_000
FAULT_BYTES = 100e3
# What kernel and ranks remember of a run has a bound, which a soak of ten minutes reaches half-way.
STEP_BYTES = 15e3
FULL_AT_STEPS = 20_000

MAKE = """
import time
from torch.utils.data import TensorDataset
_generator = torch.Generator().manual_seed(0)
_x = torch.randn(4096, 32, generator=_generator)
data = TensorDataset(_x, _x @ torch.randn(32, 1, generator=_generator))
loader = nbdist.loader(data, global_batch=64)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
nbdist.parallelize(model, "ddp")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
"""

# Rank 0 says when it is over, for clocks that are read a moment apart would disagree.
TRAIN = """
_over = torch.zeros(1)
while not _over:
    for _x, _y in loader:
        loss = torch.nn.functional.mse_loss(model(_x), _y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _over.fill_(time.monotonic() > until)
        dist.broadcast(_over, 0)
        if _over:
            break
"""

SAME = """
_mine = torch.cat([p.detach().flatten() for p in model.parameters()])
_all = [torch.empty_like(_mine) for _ in range(world_size)]
dist.all_gather(_all, _mine)
all(torch.equal(_mine, _other) for _other in _all)
"""


@dataclass(frozen=True, slots=True)
class Size:
    """What one process takes."""

    descriptors: int
    threads: int
    rss_bytes: int

    @classmethod
    def of(cls, process: psutil.Process) -> "Size":
        """Measure a process."""
        with process.oneshot():
            memory = process.memory_info()
            return cls(process.num_fds(), process.num_threads(), memory.rss)


def sizes(session: Session) -> dict[str, Size]:
    """Return what the kernel, the parent and all its children take; ranks by their number."""
    here = psutil.Process()
    names = {state.pid: f"rank {rank}" for rank, state in session._cluster.ranks.items()}
    return {"kernel": Size.of(here)} | {
        names.get(child.pid, f"process {child.pid}"): Size.of(child)
        for child in here.children(recursive=True)
    }


def train(session: Session, seconds: float) -> chaos_report.ChaosReport:
    """Train so long, again after each fault; return what the log tells of it."""
    since_s = session._cluster.events.seconds
    until = time.monotonic() + seconds
    session.run(TRAIN, params={"until": until}, retry=MANY, timeout_s=seconds + 120)
    return chaos_report.report(read_events(session.events, since_s))


@pytest.mark.soak
@pytest.mark.timeout(2 * SECONDS + 300)
def test_ten_minutes_of_faults_cost_no_session_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with nbdist.start(n=4, device="cpu") as session:
        session.run(MAKE)
        # The first faults load what is loaded once.
        session.start_chaos(ChaosPlan(tuple(FAULTS), (0, 1, 2, 3), every_s=1.0, faults=8, seed=1))
        train(session, 15.0)
        session.stop_chaos()
        free = [train(session, FREE_SECONDS)]

        chaos = session.start_chaos(ChaosPlan(tuple(FAULTS), (0, 1, 2, 3), every_s=EVERY_S))
        first = train(session, SECONDS / 2)
        before = sizes(session)
        second = train(session, SECONDS / 2)
        after = sizes(session)
        session.stop_chaos()
        report = chaos.report()

        free.append(train(session, FREE_SECONDS))
        same = session.run(SAME).value_list

    rates = [part.steps_done / part.running_s for part in free]
    share = report.steps_kept / report.running_s / (sum(rates) / len(rates))
    print(f"\n{report}\nPace:      {share:.1%} of the steps without faults ({rates} a second)")
    for name, size in after.items():
        print(f"{name:16} {before.get(name)} -> {size}")

    faults = sum(report.faults.values())
    filling = min(second.steps_done, max(0, FULL_AT_STEPS - first.steps_done))
    assert faults >= SECONDS / EVERY_S - 2
    assert report.lost_sessions == 0
    assert same == [True] * 4
    assert len(after) == len(before), "a process has stayed"
    for name, size in after.items():
        if name in before:
            assert size.descriptors <= before[name].descriptors + 4, name
            assert size.threads <= before[name].threads + 2, name
            grown_bytes = size.rss_bytes - before[name].rss_bytes
            assert grown_bytes <= 20e6 + FAULT_BYTES * faults + STEP_BYTES * filling, name
    assert share >= ENOUGH_STEPS
