"""Steps on several numbers of real ranks, and what is forecast from the first two of them."""

from pathlib import Path

import pytest

from nbdist.client.export.cells import NotebookCell
from nbdist.client.export.export import ExportRequest, export
from nbdist.client.export.worlds import Measured, ScalingError, cells_for, measure, scratch
from nbdist.client.notebook.arguments import parse_dist, parse_distributed
from nbdist.shared.errors import UsageError
from nbdist.study.forecast import fit
from nbdist.study.scaling import kind_of, points, traffic
from tests.export.torchrun import ROOT

# Compute is sleep, for two cores are not eight: 8 ms a sample. 2 MB of gradients go over a link of
# 40 MB/s; of small messages an emulated link lets the first one pass at once.
SLEEPS = """\
%%distributed
import time
from torch import nn

nbdist.emulate_link(40e6)

class Sleeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(100, 5000)

    def forward(self, x):
        time.sleep(0.008 * len(x))
        return self.net(x)

model = nbdist.parallelize(Sleeps(), "ddp").model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(4000, 100))
for (x,) in nbdist.loader(data, global_batch=16):
    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()"""


def measured(
    source: str, numbers: tuple[int, ...], folder: Path, steps: int, *, is_weak: bool = False
) -> Measured:
    cells, _ = cells_for([NotebookCell(1, source, losses={0: 1.0})], None)
    start = NotebookCell(0, "%dist start -n 2 --device cpu --threads 1")
    with scratch(folder) as path:
        made = export(
            ExportRequest(path, threads=1),
            [start, *cells],
            parse_dist,
            parse_distributed,
            folder=folder,
        )
        return measure(
            made, numbers, folder=folder, steps=steps, is_weak=is_weak, tell=lambda line: None
        )


@pytest.mark.slow
@pytest.mark.parametrize("is_weak", [False, True], ids=["strong", "weak"])
def test_one_and_two_ranks_forecast_four_and_eight(
    is_weak: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    worlds = measured(SLEEPS, (1, 2, 4, 8), tmp_path, 17, is_weak=is_weak).worlds
    kind = kind_of(worlds)
    assert kind == ("weak" if is_weak else "strong")
    model = fit(worlds[:2], kind)
    for world in worlds[2:]:
        found = model.predict(world.n)
        assert found.step_s == pytest.approx(world.step_s, rel=0.15)
        sent = traffic(world.calls, "gloo").nbytes
        assert sent == pytest.approx(2 * (world.n - 1) / world.n * 2_020_000, rel=0.01)
    for point in points(worlds, kind):
        assert sum(point.lost.values()) == pytest.approx(1 - point.efficiency)


@pytest.mark.slow
def test_a_cell_that_fails_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(ScalingError) as raised:
        measured("%%distributed\noptimizer.step()", (1, 2), tmp_path, 3)
    assert "name 'optimizer' is not defined" in str(raised.value)


def test_other_cells_that_train_are_left_out() -> None:
    cells = [
        NotebookCell(1, "%%distributed\nmodel = 1"),
        NotebookCell(2, "%%distributed\ntrain()", losses={0: 1.0}),
        NotebookCell(3, "%%distributed\nagain()", losses={0: 0.9}),
    ]
    chosen, number = cells_for(cells, None)
    assert ([cell.number for cell in chosen], number) == ([1, 3], 3)
    assert [cell.number for cell in cells_for(cells, 2)[0]] == [1, 2]
    with pytest.raises(UsageError, match="There is no cell 7 that ran") as raised:
        cells_for(cells, 7)
    assert "2, 3" in str(raised.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [("scaling -n 0", "takes numbers of ranks"), ("scaling -n 1,x", "takes numbers of ranks")],
)
def test_wrong_numbers_of_ranks_are_refused(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_dist(line)


def test_numbers_of_ranks_come_in_order() -> None:
    asked = parse_dist("scaling 3 -n 4,1,2,2")
    assert asked is not None
    assert (asked.cell, asked.n, asked.steps) == (3, (1, 2, 4), 12)
