"""Steps on several numbers of real ranks, and what is forecast from the first two of them."""

from pathlib import Path

import pytest

from nbdist.client.export.cells import NotebookCell
from nbdist.client.export.export import ExportRequest, export
from nbdist.client.export.needed import cells_for
from nbdist.client.export.worlds import Measured, ScalingError, measure, scratch
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
    cells = cells_for([NotebookCell(1, source, losses={0: 1.0})], None, parse_distributed)
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
            made,
            numbers,
            folder=folder,
            steps=steps,
            tell=lambda line: None,
            weak_from=numbers[0] if is_weak else 0,
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


CELLS = [
    NotebookCell(1, "%%distributed\nimport math\nmodel = 1"),
    NotebookCell(
        2,
        "%%distributed -p lr=0.1\nfrom torch import nn\nimport csv\nnet = nn.Linear(size(), 2)\n"
        "sgd = torch.optim.SGD(net.parameters(), lr)\n@math.floor\ndef size(): return 2.5\n"
        "unused = 1\nfor _ in range(9): sgd.step()\nhistory = sgd.step()",
        losses={0: 1.0},
    ),
    NotebookCell(3, "%%distributed\nsgd.step(); nn.ReLU(); print(history)", losses={0: 0.9}),
]


def test_of_other_cells_that_train_there_remains_what_gives_names() -> None:
    model, trained, chosen = cells_for(CELLS, None, parse_distributed)
    assert (model, chosen) == (CELLS[0], CELLS[2])
    assert trained.body.split("\n") == [
        "lr = 0.1",
        "from torch import nn",
        "net = nn.Linear(size(), 2)",
        "sgd = torch.optim.SGD(net.parameters(), lr)",
        *("@math.floor", "def size():", "    return 2.5"),
    ]
    again = [*CELLS, NotebookCell(4, "%%distributed\nmodel.step()", losses={0: 0.5})]
    assert [cell.body for cell in cells_for(again, None, parse_distributed)[1:3]] == ["", ""]


def test_a_star_import_remains_where_names_are_lacking() -> None:
    star = NotebookCell(1, "%%distributed\nfrom math import *\ntrain()", losses={0: 1.0})
    last = NotebookCell(2, "%%distributed\nsqrt(2)", losses={0: 1.0})
    assert cells_for([star, last], None, parse_distributed)[0].body == "from math import *"


def test_a_handle_means_the_newest_training_that_names_it() -> None:
    assert [cell.number for cell in cells_for(CELLS, "2", parse_distributed)] == [1, 2]
    assert [cell.number for cell in cells_for(CELLS, "net", parse_distributed)] == [1, 2]
    assert [cell.number for cell in cells_for(CELLS, "sgd", parse_distributed)] == [1, 2, 3]
    for asked, said in (
        ("7", "There is no cell 7 that ran"),
        ("mod", "No cell that has trained names"),
    ):
        with pytest.raises(UsageError, match=said) as raised:
            cells_for(CELLS, asked, parse_distributed)
        assert "2, 3" in str(raised.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("scaling -n 0", "takes numbers of ranks"),
        ("scaling -n 1,x", "takes numbers of ranks"),
    ],
)
def test_wrong_numbers_of_ranks_are_refused(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_dist(line)


def test_numbers_of_ranks_come_in_order() -> None:
    asked = parse_dist("scaling 3 -n 4,1,2,2")
    assert asked is not None
    assert (asked.cell, asked.n, asked.steps) == ("3", (1, 2, 4), 12)
