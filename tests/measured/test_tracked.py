"""What MLflow has of a real training, against what was put into it on purpose."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import nbdist
from nbdist.client.tracking.past.runs import runs
from nbdist.client.tracking.settings import own_database
from nbdist.client.tracking.shipping.shipper import sync, wait_until_sent
from tests.cluster.conftest import LONGEST_S, ROOT

pytestmark = pytest.mark.timeout(300)  # making the database of MLflow is slow where others work

LATE_S = 0.040
STEPS = 80
TOKENS = 4 * 16  # of a rank's batch

TRAIN = f"""
import time
from torch import nn

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, i):
        return torch.arange(i, i + 16) % 50

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50))
layout = nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ready, norms = [], []
for step, x in enumerate(torch.utils.data.DataLoader(Texts(), batch_size=4)):
    if step == {STEPS}:
        break
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    if rank == 1:
        time.sleep({LATE_S})
    ready.append(time.time())  # one host, one clock
    loss.backward()
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
    optimizer.step()
(ready, norms, repr(layout.explain()))
"""


@dataclass(frozen=True)
class Trained:
    """`ready` and `norms` by rank and step, as the cell itself measured them; the run in MLflow."""

    ready: tuple[list[float], list[float]]
    norms: tuple[list[float], list[float]]
    explained: str
    client: Any
    run_id: str

    def history(self, key: str) -> dict[int, float]:
        """Return a metric's values by step."""
        return {m.step: m.value for m in self.client.get_metric_history(self.run_id, key)}

    def usual(self, key: str) -> float:
        """Return the median of a metric over the run."""
        return median(self.history(key).values())

    def file(self, name: str) -> str:
        """Return the text of an artifact."""
        return Path(self.client.download_artifacts(self.run_id, name)).read_text()

    @property
    def late_s(self) -> float:
        """How much later rank 1 was ready to communicate, as a rule."""
        return median(b - a for a, b in zip(*self.ready, strict=True))

    @property
    def step_s(self) -> float:
        """How long a step took, as a rule."""
        return median(b - a for a, b in pairwise(self.ready[0]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        session = nbdist.start(n=2, device="cpu", grad_norm=True)
        try:
            first, second = session.run(TRAIN, run_name="late", timeout_s=3 * LONGEST_S).value_list
        finally:
            session.stop()
        home = folder / ".nbdist"
        if not wait_until_sent(home, LONGEST_S):
            assert sync(home).endswith("points).")
        from mlflow import MlflowClient

        (row,) = runs(home)
        yield Trained(
            (first[0], second[0]),
            (first[1], second[1]),
            first[2],
            MlflowClient(own_database(home)),
            row.run_id,
        )


def test_skew_and_waiting_are_the_delay_that_was_planted(trained: Trained) -> None:
    assert trained.late_s > 0.9 * LATE_S
    near_s = max(0.05 * trained.late_s, 0.003)
    assert trained.usual("rank_wait_ms/00") == pytest.approx(
        1000 * trained.late_s, abs=1000 * near_s
    )
    assert trained.usual("rank_wait_ms/01") < 1000 * near_s
    assert trained.usual("skew_ms") == pytest.approx(1000 * trained.late_s, abs=1000 * near_s)
    # One of two ranks waits.
    share = 100 * trained.late_s / (2 * trained.step_s)
    assert trained.usual("wait_pct") == pytest.approx(share, abs=100 * near_s / trained.step_s)


def test_throughput_counts_the_tokens_of_both_ranks(trained: Trained) -> None:
    # Medians of two clocks over the same steps: where cores are shared these differ, but not by as
    # much as the tokens of one rank do.
    assert trained.usual("tokens_per_s") == pytest.approx(2 * TOKENS / trained.step_s, rel=0.2)
    assert trained.usual("samples_per_s") == pytest.approx(2 * 4 / trained.step_s, rel=0.2)
    tokens, samples = trained.history("tokens_per_s"), trained.history("samples_per_s")
    assert tokens == pytest.approx({step: rate * TOKENS / 4 for step, rate in samples.items()})


def test_the_gradient_norm_is_the_one_that_clipping_finds(trained: Trained) -> None:
    found = trained.history("grad_norm")
    assert sorted(found) == list(range(1, STEPS + 1))
    for norms in trained.norms:
        assert [found[step] for step in sorted(found)] == pytest.approx(norms, rel=1e-4)


def test_the_verdict_and_the_layout_stay_with_the_run(trained: Trained) -> None:
    said = trained.file("verdicts.txt").splitlines()
    assert said[0].startswith("Rank 1 ")
    tags = trained.client.get_run(trained.run_id).data.tags
    assert tags["nbdist.verdict"] == "; ".join(said)
    assert trained.file("layout.txt") == f"{trained.explained}\n"
    assert "layout_explained" not in trained.client.get_run(trained.run_id).data.params
