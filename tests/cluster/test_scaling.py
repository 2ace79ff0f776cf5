"""`%dist scaling`: the notebook's own step on other ranks than its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import LONGEST_S, Kernel

TRAINS = """\
%%distributed
torch.manual_seed(0)
net = nbdist.parallelize(torch.nn.Linear(8, 4), "ddp").model
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
pairs = torch.utils.data.TensorDataset(torch.randn(400, 8))
steps = 0
for (x,) in nbdist.loader(pairs, global_batch=16):
    sgd.zero_grad(); net(x).square().mean().backward(); sgd.step()
    steps += 1"""


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Kernel]:
    """A notebook of its own: all of its cells become the script."""
    kernel = Kernel(tmp_path)
    kernel.run("%load_ext nbdist")
    kernel.run("%dist start -n 2 --device cpu", timeout_s=2 * LONGEST_S)
    yield kernel
    kernel.close()


def test_a_cells_steps_are_measured_beside_the_session(fresh: Kernel) -> None:
    """What it prints says: how many ranks, that losses sum, what is a forecast, and of what."""
    notebook = fresh
    assert notebook.run(TRAINS).error is None
    shown = notebook.run("%dist scaling --steps 6 -n 1,2", timeout_s=150)
    assert shown.error is None
    assert "Strong scaling, measured:" in shown.text
    assert "Strong: all ranks together take 16 samples a step, as the cell is." in shown.text
    assert "4 steps on each" in shown.text
    rows = [line.split() for line in shown.text.splitlines()]
    measured = {row[0]: row for row in rows if row and row[0] in ("1", "2") and "ms" in row}
    assert set(measured) == {"1", "2"}
    assert ["image/png" in kinds for kinds in shown.mimes] == [True]
    left = notebook.run("%%distributed\nprint(steps, net.weight.grad.shape)")
    assert "25 torch.Size([4, 8])" in left.text

    changes = notebook.run("%dist scaling --what-if")
    assert changes.error is None
    assert "All others are forecasts" in changes.text
    for change in ("twice the bandwidth", "bf16 compression", "local SGD every 8"):
        assert change in changes.text
