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

AGAIN = """\
%%distributed
for (x,) in nbdist.loader(pairs, global_batch=16):
    sgd.zero_grad(); net(x).square().mean().backward(); sgd.step()"""


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
    assert notebook.run(AGAIN).error is None
    shown = notebook.run("%dist scaling net --weak --steps 6 -n 1,2", timeout_s=150)
    assert shown.error is None
    assert "Strong scaling, measured:" in shown.text
    assert "Strong: all ranks together take 16 samples a step, as the cell is." in shown.text
    assert "Weak: each rank takes 16 samples a step" in shown.text
    assert "4 steps on each" in shown.text
    assert "names that nothing else gives: cell 3." in shown.text
    strong, _, weak = shown.text.partition("Weak scaling, measured:")
    for table in (strong, weak.partition("Strong scaling")[0]):
        rows = [line.split() for line in table.splitlines()]
        assert [row[0] for row in rows if row and row[0] in "12" and "ms" in row] == ["1", "2"]
    assert ["image/png" in kinds for kinds in shown.mimes] == [True]
    left = notebook.run("%%distributed\nprint(steps, net.weight.grad.shape)")
    assert "25 torch.Size([4, 8])" in left.text

    changes = notebook.run("%dist scaling --what-if --on ib400")
    assert changes.error is None
    assert "All others are forecasts" in changes.text
    for change in (
        "over 400 Gbit InfiniBand",
        "twice the bandwidth",
        "bf16 compression",
        "local SGD every 8",
    ):
        assert change in changes.text
