"""Notebooks as people write them: what is exported begins as they did, and `--check` proves it."""

import subprocess
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from nbdist.client.export.check import ExportError, check
from nbdist.client.export.script import Script, ScriptOptions
from tests.export.torchrun import ROOT, torchrun

START = "%load_ext nbdist\n%dist start -n 2 --device cpu --threads 1"

# A dict that is pushed, a table, a plot between cells, and an import that is not there.
CONFIG = [
    START,
    "import pandas as pd\ncfg = {'lr': 0.1, 'epochs': 2}\npd.DataFrame([cfg])",
    "%dist push cfg",
    """\
%%distributed
from torch import nn
torch.manual_seed(0)
model = nbdist.parallelize(nn.Linear(4, 1).to(device), "ddp").model
optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"])
losses = []""",
    "%%distributed\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()",
    """\
%%distributed
try:
    import not_there
except ImportError:
    not_there = None
generator = torch.Generator().manual_seed(rank)
for epoch in range(cfg["epochs"]):
    x = torch.randn(16, 4, generator=generator)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
losses""",
]
# Plain torch: a class defined twice, %time, help on a name, an early end, torch.save.
NET = """\
%%distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, WIDTH)
        self.b = nn.Linear(WIDTH, 1)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))"""
PLAIN = [
    START,
    NET.replace("WIDTH", "2"),
    NET.replace("WIDTH", "8"),
    """\
%%distributed
from tqdm.auto import tqdm
torch.manual_seed(1)
net = DDP(Net().to(device))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
def train(steps):
    best, worse = 1e9, 0
    for step in tqdm(range(steps)):
        x = torch.randn(16, 4)
        loss = ((net(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        best, worse = (loss.item(), 0) if loss.item() < best else (best, worse + 1)
        if worse > 5: break
    return best
%time best = train(20)
if rank == 0: torch.save(net.state_dict(), "net.pt")
best""",
    "%%distributed\nnet?",
]
# A sweep, and a function that trains and draws.
SWEEP = [
    START,
    """\
%%distributed
import matplotlib.pyplot as plt
from IPython.display import clear_output
from torch import nn
def plot_losses(losses):
    clear_output(wait=True)
    plt.figure(); plt.plot(losses); plt.show()
def train_epoch(model, optimizer, losses):
    for _ in range(5):
        loss = ((model(torch.randn(8, 4)) - 1) ** 2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    if rank == 0: plot_losses(losses)""",
    """\
%%distributed -p lr=[0.1,0.01] -p h=[4,8]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, h), nn.ReLU(), nn.Linear(h, 1))
nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
losses = []
for epoch in range(2): train_epoch(model, optimizer, losses)""",
]
# Functions and a class of the notebook's, which read what is computed there.
PUSHED = [
    START,
    """\
text = "hello world, hello torch. " * 20
stoi = {c: i for i, c in enumerate(sorted(set(text)))}
import torch
from torch import nn
block = 8""",
    """\
def get_batch(generator):
    data = torch.tensor([stoi[c] for c in text])
    at = torch.randint(len(data) - block - 1, (4,), generator=generator)
    rows = torch.stack([data[i:i+block+1] for i in at])
    return rows[:, :-1], rows[:, 1:]""",
    """\
class CharLM(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.embedding = nn.Embedding(n, 16)
        self.head = nn.Linear(16, n)
    def forward(self, x):
        return self.head(self.embedding(x))""",
    "n_chars = len(stoi)\n%dist push get_batch CharLM n_chars",
    "del stoi",
    """\
%%distributed
torch.manual_seed(0)
model = nbdist.parallelize(CharLM(n_chars).to(device), "ddp").model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(rank)
for step in range(10):
    x, y = get_batch(generator)
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
loss.item()""",
]
# Shards, checkpoints, a file that is written, and a model that is published.
SHARDS = [
    START,
    """\
%%distributed
from torch import nn
import json
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
nbdist.parallelize(model, "fsdp=2")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))""",
    """\
%%distributed --checkpoint every=2
for epoch in range(2):
    for xb, yb in nbdist.loader(data, global_batch=16):
        loss = ((model(xb) - yb) ** 2).mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
    nbdist.save(metric=loss.item())""",
    """\
%%distributed
if rank == 0: json.dump({"loss": 1}, open("out.json", "w"))
nbdist.publish(model, "regression", example=x[:2])""",
]
# Two cells that succeeded, in this order; the second ran with what only the kernel had changed.
CHANGED = [
    START,
    """\
%%distributed
torch.manual_seed(0)
model = nbdist.parallelize(torch.nn.Linear(4, 1), "ddp").model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)""",
    "import nbdist\nnbdist.current().run('with torch.no_grad(): model.weight.fill_(0.5)')",
    """\
%%distributed
loss = model(torch.ones(2, 4)).sum()
loss.backward(); optimizer.step()""",
]
# Two optimizers that step in turns: the first step is that of both.
GAN = [
    START,
    """\
%%distributed
from torch import nn
torch.manual_seed(0)
G = nbdist.parallelize(nn.Linear(2, 4), "ddp").model
D = nbdist.parallelize(nn.Linear(4, 1), "ddp").model
of_g = torch.optim.SGD(G.parameters(), lr=0.1)
of_d = torch.optim.SGD(D.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
for step in range(4):
    z, real = torch.randn(8, 2, generator=generator), torch.randn(8, 4, generator=generator)
    of_d.zero_grad(); (D(G(z).detach()) - D(real)).mean().square().backward(); of_d.step()
    of_g.zero_grad(); (D(G(z)) - 1).square().mean().backward(); of_g.step()""",
]
EXPORT = "%dist export train.py --check"


def exported(cells: list[str], folder: Path) -> Any:
    """Run the cells in a kernel, export them, and return the outputs of that."""
    made = [nbformat.v4.new_code_cell(source) for source in [*cells, EXPORT]]
    notebook = nbformat.v4.new_notebook(cells=made)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=240, resources=resources, allow_errors=True).execute()
    failed = [
        output
        for cell in notebook.cells[:-1]
        for output in cell.outputs
        if output.output_type == "error"
    ]
    assert failed == []
    return notebook.cells[-1].outputs


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(CONFIG, marks=pytest.mark.slow, id="config"),
        pytest.param(PLAIN, marks=pytest.mark.slow, id="plain torch"),
        pytest.param(SWEEP, marks=pytest.mark.slow, id="sweep"),
        pytest.param(PUSHED, id="pushed functions"),
        pytest.param(SHARDS, marks=pytest.mark.slow, id="shards"),
        pytest.param(GAN, marks=pytest.mark.slow, id="two optimizers"),
    ],
)
def test_a_notebooks_script_begins_with_its_loss(
    cells: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("NBDIST_STATIC", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    told = "".join(output.get("text", "") for output in exported(cells, tmp_path))
    assert "Checked: its first step under torchrun has loss " in told
    assert "as in the notebook." in told
    if request.node.get_closest_marker("slow"):  # test_own_group runs one to its end each time
        ran = torchrun(tmp_path / "train.py", 2)
        assert ran.returncode == 0, ran.stderr


@pytest.mark.slow  # as the next one says of a script alone
def test_a_notebooks_script_that_begins_otherwise_is_an_error_with_both_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBDIST_STATIC", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    *_, error = exported(CHANGED, tmp_path)
    assert error.ename == "ExportError"
    assert "train.py begins with loss " in error.evalue
    assert "and the notebook with loss " in error.evalue
    assert "# Cell 3 is left out: it ran code on the ranks by other means" in (
        (tmp_path / "train.py").read_text()
    )


def script_of(nodes: int = 1) -> Script:
    options = ScriptOptions(2, "cpu", nodes, threads=1)
    return Script("train.py", "", options, (1,), (), (), (), (), False)


STEP = """
import nbdist, torch
nbdist.init(layouts=["ddp"], threads=1)
model = nbdist.parallelize(torch.nn.Linear(4, 1), "ddp").model
torch.nn.init.ones_(model.weight); torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(2, 4)).mean()
loss.backward(); optimizer.step()
"""


def test_a_script_that_begins_otherwise_is_an_error_with_both_losses(tmp_path: Path) -> None:
    (path := tmp_path / "train.py").write_text(STEP)
    with pytest.raises(ExportError) as caught:
        check(path, script_of(), {0: 4.0, 1: 0.5})
    assert "train.py begins with loss 4, and the notebook with loss 4 on rank 0, 0.5 on rank 1" in (
        caught.value.what
    )
    assert caught.value.why.startswith("rank 1 of the first step differ")


def test_a_script_that_fails_is_told_with_its_error(tmp_path: Path) -> None:
    (path := tmp_path / "train.py").write_text("import torch\nprint(nothing_gives_this)\n")
    with pytest.raises(ExportError) as caught:
        check(path, script_of(), {0: 1.0})
    assert "fails under torchrun before its first step is over" in caught.value.what
    assert "NameError: name 'nothing_gives_this' is not defined" in caught.value.why


def test_a_script_of_several_machines_is_not_checked_here(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is not checked: it is for 2 machines"):
        check(tmp_path / "train.py", script_of(2), {})


def test_a_script_without_a_step_in_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expire(*_: Any, timeout_s: float) -> None:
        raise subprocess.TimeoutExpired("torchrun", timeout_s)

    monkeypatch.setattr("nbdist.client.export.check.launch", expire)
    with pytest.raises(ExportError, match="has made no step in 600 s under torchrun"):
        check(tmp_path / "train.py", script_of(), {})
