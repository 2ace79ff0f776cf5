"""One rank or one link of a real training is made slow on purpose; who it is and why is said.

Four ranks share the cores of the machine that runs the tests, so all of them are noisy alike.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

import nbdist
from nbdist import Session
from nbdist.client.metrics.analysis.stragglers import StragglerDetector
from nbdist.client.metrics.analysis.values import Straggler
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.shared.wire import Record
from tests.cluster.conftest import LONGEST_S, ROOT

N = 4
STEP_S = 0.020  # of a rank's own: it sleeps, so that ranks do not slow each other down
STEPS = 80

LOOP = f"""
import os, time
import torch
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, i):
        return torch.ones(64), torch.tensor(1)
    def __getitems__(self, indices):
        in_loader()
        return [self[0]] * len(indices)

class Net(nn.Sequential):
    def forward(self, x):
        time.sleep(0.4 * pause)
        in_forward()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: (time.sleep(0.6 * pause), in_backward(), None)[2])
        return y

nothing = lambda: None
in_loader = in_forward = in_backward = nothing
def compute(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until: pass

wrap = nn.parallel.DistributedDataParallel
batch, width, steps, pause = 8, 64, {STEPS}, {STEP_S}
step = 0
"""

TRAIN = """
torch.manual_seed(0)
net = Net(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))
model = wrap(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (x, y) in enumerate(torch.utils.data.DataLoader(Data(), batch_size=batch)):
    if step == steps:
        break
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""

# Who steals runs in the rank's own session: Linux shares a core out by session first.
STOLEN = f"""
import subprocess, sys
THIEF = "import os\\nparent = os.getppid()\\nwhile os.getppid() == parent: pass"
thieves = []

def pin(cores):
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)

def steal(core, of_others, of_rank):
    pin([core if rank == of_rank else of_others])
    if rank == of_rank:  # they inherit its core
        thieves.extend(subprocess.Popen([sys.executable, "-c", THIEF]) for _ in range(5))

def give_back(cores):
    for thief in thieves:
        thief.kill()
        thief.wait()
    thieves.clear()
    pin(cores)

in_forward = lambda: compute({STEP_S / 8})
"""

# Each token costs its expert as much; of eight tokens, on each rank, rank 1's expert gets five.
EXPERTS = f"""
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn({N}, 64, 64) / 8)
    def forward(self, x, index, weight):
        compute(len(x) * {STEP_S} / 20)
        return ((x[:, None, None] @ self.weight[index]).squeeze(2) * weight[..., None]).sum(1)

class Mixed(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.experts, self.head = Experts(), layers[-1]
    def forward(self, x):
        time.sleep(pause)
        index = torch.tensor([1, 1, 1, 1, 0, 1, 2, 3])[:len(x), None]
        return self.head(self.experts(x, index, torch.ones(len(x), 1)))

def wrap(net):
    example = nbdist.ExpertParallel(example=torch.ones(8, 64))
    return nbdist.parallelize(net, "ep={N}", example).model

Net = Mixed
"""


class Trainings:
    """A session of four ranks, and what a judge says of each training in it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.records: list[Record] = []

    def run(self, setup: str = "", steps: int = STEPS) -> StragglerDetector:
        """Train; `setup` is run before, on every rank."""
        self.records.clear()
        self.session.run(f"{LOOP}\nsteps = {steps}\n{setup}\n{TRAIN}", timeout_s=3 * LONGEST_S)
        judge = StragglerDetector()
        for record in self.records:
            judge.add(record)
        return judge

    def verdict(self, setup: str, steps: int = STEPS) -> Straggler:
        """Train and return the only verdict."""
        verdicts = self.run(setup, steps).verdicts()
        self.show()
        assert len(verdicts) == 1, [verdict.sentence for verdict in verdicts]
        return verdicts[0]

    def show(self) -> None:
        """Print each rank's means, for whoever reads why a test failed."""
        for rank in range(N):
            rows = [r.values for r in self.records if r.kind == "step" and r.rank == rank][2:]
            names = sorted({name for row in rows for name in row if name.endswith("_s")})
            means = {n: 1e3 * sum(row.get(n, 0.0) for row in rows) / len(rows) for n in names}
            print(rank, ", ".join(f"{name[:-2]} {ms:.1f}" for name, ms in means.items()), "ms")

    def said_while_running(self) -> set[tuple[int, str]]:
        """Return every verdict that a judge gave at any moment of the last training."""
        judge, said = StragglerDetector(), set()
        for number, record in enumerate(sorted(self.records, key=lambda r: r.time_ns)):
            judge.add(record)
            if number % (10 * N) == 0:
                said |= {(v.rank, v.sentence) for v in judge.verdicts()}
        return said


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("stragglers"))
        patch.setenv("PYTHONPATH", str(ROOT))
        begin = Telemetry.__init__

        def subscribed(telemetry: Telemetry, *args: Any, **more: Any) -> None:
            begin(telemetry, *args, **more)
            telemetry.subscribe(made.records.extend)

        patch.setattr(Telemetry, "__init__", subscribed)
        session = nbdist.start(n=N, device="cpu")
        made = Trainings(session)
        yield made
        session.stop()


# DDP waits for the others in backward, FSDP in forward too.
WRAPS = {"ddp": "", "fsdp": "from torch.distributed.fsdp import fully_shard as wrap"}


@pytest.mark.parametrize(
    ("part", "wrap"),
    [
        ("loader", "ddp"),
        ("backward", "fsdp"),
        # In forward a rank computes longer below, under ddp.
        pytest.param("backward", "ddp", marks=pytest.mark.slow),
        pytest.param("forward", "fsdp", marks=pytest.mark.slow),
        pytest.param("forward", "ddp", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_sleeps_is_named_with_the_part_in_which_it_does(
    trainings: Trainings, part: str, wrap: str
) -> None:
    sleeps = f"if rank == 2: in_{part} = lambda: time.sleep({STEP_S / 2})"
    verdict = trainings.verdict(f"{WRAPS[wrap]}\n{sleeps}")
    assert (verdict.rank, verdict.cause) == (2, "data" if part == "loader" else part)
    assert 0.3 < verdict.share < 0.8
    if part != "loader":
        assert f"its {part} takes" in verdict.sentence
        assert "the rank is idle" in verdict.sentence


def test_a_rank_that_computes_longer_is_named_with_the_part_in_which_it_does(
    trainings: Trainings,
) -> None:
    verdict = trainings.verdict(f"if rank == 1: in_forward = lambda: compute({STEP_S / 2})")
    assert (verdict.rank, verdict.cause) == (1, "forward")
    assert "it computes longer, forward takes" in verdict.sentence


def test_a_rank_whose_core_others_use_is_named(trainings: Trainings) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("NOT TESTED: a rank whose core others use, for there is but one core")
    try:
        verdict = trainings.verdict(f"{STOLEN}\nsteal({cores[0]}, {cores[1]}, of_rank=1)", 150)
    finally:
        trainings.session.run(f"give_back({cores})")
    assert (verdict.rank, verdict.cause) == (1, "starved")
    assert "Rank 1 shares its core: " in verdict.sentence


def test_a_rank_with_a_bigger_batch_is_named(trainings: Trainings) -> None:
    works = f"in_forward = lambda: time.sleep({STEP_S / 16} * batch)"
    verdict = trainings.verdict(f"if rank == 3: batch = 16\n{works}")
    assert (verdict.rank, verdict.cause) == (3, "batch")
    assert verdict.sentence == "Rank 3 gets bigger batches: 16 samples per step against 8."


def test_a_rank_whose_experts_get_more_tokens_is_named(trainings: Trainings) -> None:
    verdict = trainings.verdict(EXPERTS)
    assert (verdict.rank, verdict.cause) == (1, "experts")
    assert (
        "its experts get 2.5 times an even share of the tokens, 0.5 times on the others (20 a "
        in (verdict.sentence)
    )


def test_a_rank_whose_link_is_slow_is_named(trainings: Trainings) -> None:
    wide = "width = 2048"  # 0.6 MB of gradients
    try:
        verdict = trainings.verdict(f"{wide}\nif rank == 3: nbdist.emulate_link(20e6)", 130)
    finally:
        trainings.session.run("nbdist.emulate_link(None)")
    assert (verdict.rank, verdict.cause) == (3, "link")
    assert "The link of rank 3 is slow: " in verdict.sentence


def test_ten_slow_steps_and_load_that_all_have_are_silent(trainings: Trainings) -> None:
    trainings.run(f"if rank == 2: in_loader = lambda: 50 <= step < 60 and time.sleep({STEP_S})")
    assert trainings.said_while_running() == set()
    trainings.run(f"in_loader = lambda: time.sleep({STEP_S})")
    assert trainings.said_while_running() == set()


@pytest.mark.slow  # the next test has less rest
def test_a_thousand_clean_steps_are_silent(trainings: Trainings) -> None:
    trainings.run("pause = 0.005", steps=1000)
    assert trainings.said_while_running() == set()


@pytest.mark.slow
def test_a_thousand_clean_steps_that_keep_every_core_busy_are_silent(trainings: Trainings) -> None:
    trainings.run("pause = 0.002\nin_forward = lambda: compute(0.002)", steps=1000)
    assert trainings.said_while_running() == set()
