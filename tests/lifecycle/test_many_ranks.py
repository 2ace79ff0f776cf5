"""Sixty-four ranks, as they start, train, are asked, fail and stop on one machine."""

import json
from pathlib import Path

import psutil
import pytest

from tests.lifecycle.kernels import Family, Notebook

N = 64
STEPS = 3
LONG_S = 540.0  # a bound that tells a hang from a slow machine: gloo's ring has 126 hops there

TRAIN = f"""
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({STEPS}):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
    nbdist.log(value=float(rank))
"""

# How many values of each kind have come from how many ranks, and what their series end with.
RECORDS = """
import json
telemetry = nbdist.current()._attempts.shown.telemetry
found = {key: telemetry.series(key) for key in ("loss", "value")}
said = {key: [len(ranks), sorted({s.seen for s in ranks.values()})] for key, ranks in found.items()}
said["last"] = [float(s.values[s.n - 1]) for _, s in sorted(found["value"].items())]
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_64_ranks_start_train_tell_all_fail_and_stop(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        said = notebook.run(
            f"import nbdist\n%load_ext nbdist\n%dist start -n {N} --device cpu", LONG_S
        )
        assert f"Started {N} ranks" in said, said
        ranks = [pid for key, pid in notebook.pids().items() if key.startswith("rank")]
        assert len(ranks) == N

        assert not notebook.run("%%distributed\npass", LONG_S)
        said = notebook.run(
            "%%distributed\nx = torch.ones(1); dist.all_reduce(x); x.item()", LONG_S
        )
        assert f"{float(N)}" in said

        said = notebook.run(f"%%distributed --no-track\n{TRAIN}", LONG_S)
        assert "Traceback" not in said, said
        records = json.loads(notebook.run(RECORDS))
        assert records["loss"] == records["value"] == [N, [STEPS]]
        assert records["last"] == [float(rank) for rank in range(N)]

        table = notebook.run("%dist status", LONG_S).splitlines()
        lines = [line for line in table if line.split()[:1] and line.split()[0].isdigit()]
        assert [int(line.split()[0]) for line in lines[-N:]] == list(range(N))
        assert all(" idle " in line for line in lines[-N:])

        said = notebook.run("%%distributed\nassert rank != 40, 'no'\ndist.barrier()", LONG_S)
        assert "rank 40" in said, said
        assert "AssertionError" in said, said
        said = notebook.run(
            "%%distributed\nx = torch.ones(1); dist.all_reduce(x); x.item()", LONG_S
        )
        assert f"{float(N)}" in said

        family = Family(notebook.pid)
        assert "Stopped" in notebook.run("%dist stop")
        assert not any(psutil.pid_exists(pid) for pid in ranks)
    family.assert_gone()
