"""What an earlier version has written opens: checkpoint, run, spool, baseline and notebook.

`written_by_4d94b5d.tar.gz` is a notebook's folder as commit 4d94b5d left it: a training under zero3
with a schedule, saved as `kept`; its run `digits`, not sent to MLflow yet; the baseline that `%dist
expect step <= 3 x baseline` wrote; and `weights.json`, the weights at the end.
"""

import json
import tarfile
from pathlib import Path

import pytest

from nbdist import cli
from tests.lifecycle.kernels import Notebook, wait_for

ARCHIVE = Path(__file__).with_name("written_by_4d94b5d.tar.gz")
WRITTEN_IN = "/home/ada/digits"

BUILD = """
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
layout = nbdist.parallelize(model, "LAYOUT")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
x = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
"""
RESTORE = """
import json
nbdist.restore("kept")
weights = {name: value.tolist() for name, value in layout.state_dict().items()}
if rank == 0: assert weights == json.load(open("weights.json"))
(group,), (state, *_) = optimizer.param_groups, optimizer.state.values()
print("step", int(state["step"]), "lr", group["lr"])
"""
TRAIN = """
for xb, yb in nbdist.loader(data, global_batch=16):
    loss = torch.nn.functional.cross_entropy(model(xb), yb)
    optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The notebook's folder, where its paths are."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    found = tmp_path / "digits"
    for file in found.rglob("*.json*"):
        if file.suffix != ".gz":
            file.write_text(file.read_text().replace(WRITTEN_IN, str(found)))
    return found


@pytest.mark.slow
def test_a_training_goes_on_from_it_and_its_run_is_shown_sent_and_compared_with(
    folder: Path,
) -> None:
    name = str(folder / "digits.ipynb")
    with Notebook(folder, NBDIST_STATIC="1", JPY_SESSION_NAME=name) as notebook:
        notebook.start()
        for layout in ("zero3", "ddp"):
            notebook.on_ranks(BUILD.replace("LAYOUT", layout))
            assert "step 4 lr 0.0001" in notebook.on_ranks(RESTORE)
        assert "kept" in notebook.run("import nbdist; print(nbdist.saved('kept'))")
        own = notebook.on_ranks("print(nbdist.saved())", "-r 0 --no-track")
        assert ".nbdist/checkpoints/digits" in own
        assert notebook.run("print(nbdist.saved())").strip() in own
        assert "Run digits: Step 4: loss 0.766, from 0.671 on rank 0 to 0.862" in (
            notebook.run("%dist board loss --run digits")
        )
        notebook.on_ranks(BUILD.replace("LAYOUT", "zero3"))
        notebook.on_ranks(TRAIN, "--run digits")
        told = notebook.run("%dist expect bytes 1 %")
        assert "bytes 1 % holds" in told
        assert "is the baseline" not in told, told
        wait_for(
            lambda: "not yet" not in notebook.run("%dist runs --sync"),
            "both runs to be in MLflow",
            timeout_s=120.0,
        )
        assert notebook.run("%dist runs").count("digits  finished  zero3") == 2


def test_its_notebook_is_exported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert cli.main(["export", "digits.ipynb", "train.py"]) == 0
    assert 'nbdist.save("kept", wait=True)' in Path("train.py").read_text()
    assert json.loads(Path("digits.baseline.json").read_text())["runs"]["digits"]
