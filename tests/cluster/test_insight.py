"""What a cell's insight knows, through a real kernel and real engines."""

import json
from typing import Any

import pytest

from tests.cluster.conftest import Kernel

LATE_MS = 40

TRAIN = f"""
import time
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(30):
    loss = model(torch.ones(4, 64)).square().mean()
    if rank == 1: time.sleep({LATE_MS} / 1e3)
    loss.backward()
    optimizer.step(); optimizer.zero_grad()
"""

LOOK = """
import dataclasses, json, threading
from nbdist.client.notebook import current as _kernel
_showing = _kernel.current()._attempts._showing
print(json.dumps({"threads": [t.name for t in threading.enumerate()],
                  **dataclasses.asdict(_showing.insight.now())}))
"""


def look(notebook: Kernel) -> dict[str, Any]:
    """Return the analysis of the newest cell."""
    ran = notebook.run(LOOK)
    assert ran.error is None, ran.error
    found: dict[str, Any] = json.loads(ran.text)
    return found


def test_the_rank_that_comes_late_is_named_and_the_other_waits_for_it(notebook: Kernel) -> None:
    ran = notebook.cell(TRAIN, "--no-track")
    assert ran.error is None, ran.error
    found = look(notebook)
    assert found["clock_error_ms"] == 0, "one host, one clock"
    assert found["explained_until"] >= 28
    first, second = found["ranks"]
    assert first["waits_for"][0] == 1
    assert first["parts"]["waiting"] > 0.9 * LATE_MS
    assert second["parts"]["waiting"] < 0.5 * first["parts"]["waiting"]
    for rank in (first, second):
        assert abs(sum(rank["parts"].values()) - rank["step_ms"]) < 1e-6
    (row,) = [row for row in found["table"] if row["count"] > 0.9]
    assert (row["kind"], row["bytes"]) == ("all_reduce", 4 * (64 * 64 + 64))
    assert row["last"][0] == 1
    assert row["last"][1] > 0.9
    assert row["skew_ms"] > 0.9 * LATE_MS
    line = found["line"]
    assert len(line["steps"]) == 3
    begin, end = line["steps"][0][1:]  # as rank 0 had them: rank 1 may be in its step before
    own, other = (lane["spans"][0] for lane in line["lanes"])
    assert begin < own["launch_ms"] < own["arrived_ms"] + 1e-6 < end
    assert other["launch_ms"] < other["arrived_ms"] + 1e-6 < end
    assert "nbdist-analysis" not in found["threads"]


def test_a_cell_that_trains_nothing_knows_nothing_and_begins_no_thread(notebook: Kernel) -> None:
    notebook.cell("t = torch.ones(2); dist.all_reduce(t)")
    found = look(notebook)
    assert found["ranks"] == []
    assert found["line"] is None
    assert "nbdist-analysis" not in found["threads"]


@pytest.mark.slow
def test_the_board_has_what_each_rank_takes_of_processor_and_memory_over_time(
    notebook: Kernel,
) -> None:
    ran = notebook.cell(TRAIN.replace("range(30)", "range(90)"), "--no-track")
    assert ran.error is None, ran.error
    ran = notebook.run("""
    import json
    from nbdist.client.notebook import current as _kernel
    past = _kernel.current()._attempts._showing._last_board
    print(json.dumps({"text": past.plain("ranks"), "panels": [
        [panel.key, [[line.rank, list(line.x), list(line.y)] for line in panel.lines]]
        for panel in past.scene.devices]}))
    """)
    assert ran.error is None, ran.error
    found = json.loads(ran.text)
    panels = dict(found["panels"])
    assert set(panels) == {"cpu_pct", "resident_bytes"}
    for rank, seconds, shares in panels["cpu_pct"]:
        assert rank in (0, 1)
        assert len(seconds) >= 2
        assert seconds == sorted(seconds)
        assert all(0 < share < 6400 for share in shares)
    assert all(min(sizes) > 50e6 for _, _, sizes in panels["resident_bytes"])
    assert "processor use of a core" in found["text"]
    assert "cpu %" in found["text"]
