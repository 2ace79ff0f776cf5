"""Checkpoints where processes die: a rank in the midst of its save, and the notebook's kernel."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.lifecycle.kernels import Family, Notebook, wait_for

_BUILD = """
import torch
def make():
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4))
    model = nbdist.parallelize(net, "zero3").model
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x[:, :4].sin())
    return model, opt, nbdist.loader(data, global_batch=8, seed=2)
model, opt, loader = make()
"""

# Each step takes a while, so that a kernel can be killed in the midst of it. The last line is what
# the weights have come to.
_TRAIN = """
import time, zlib
def train(epochs):
    while loader.epoch < epochs:
        for x, y in loader:
            (model(x) - y).pow(2).mean().backward()
            opt.step(); opt.zero_grad()
            time.sleep(PAUSE)
train(2)
mine = 0
for p in model.parameters():
    mine = zlib.crc32(p.full_tensor().detach().numpy().tobytes(), mine)
print(f"weights {mine}")
"""


def weights_of(said: str) -> str:
    found = re.search(r"weights (\d+)", said)
    assert found, said
    return found[1]


_ONE_STEP = "model(torch.ones(2, 8)).sum().backward(); opt.step(); opt.zero_grad()\n"

_DIES_IN_ITS_SAVE = """
import os, signal, sys
from nbdist.engine.checkpoint import save
save.AT_CELL_END_S = 3600.0  # that the cell's end waits where nobody tells of the death
def kill(event, args):
    if event == "open" and "step-00000002" in str(args[0]) and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
nbdist.save()
"""


def test_a_rank_that_dies_in_its_save_is_told_of_at_once_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.start()
        said = notebook.on_ranks(_BUILD + _ONE_STEP + "nbdist.save(wait=True)")
        assert "1 checkpoint saved, the newest of step 1" in said
        said = notebook.on_ranks(_ONE_STEP + _DIES_IN_ITS_SAVE)
        assert "rank 1 (localhost, cpu) died: killed by SIGKILL" in said
        assert "The checkpoint of step 2 was not written: rank 1 died." in said
        run = next((tmp_path / ".nbdist" / "checkpoints").iterdir())
        assert (run / "latest").read_text() == "step-00000001"

        said = notebook.on_ranks(_BUILD + "print(nbdist.restore().step)\n" + _ONE_STEP)
        assert "Restored step 1" in said
        said = notebook.on_ranks("print(nbdist.save(wait=True).step)")
        assert "1 checkpoint saved, the newest of step 2" in said, said
        assert sorted(path.name for path in run.iterdir()) == [
            "latest",
            "step-00000001",
            "step-00000002",
        ]


@pytest.mark.slow
def test_a_training_goes_on_in_a_new_kernel_where_the_last_was_killed(tmp_path: Path) -> None:
    (tmp_path / "unbroken").mkdir()
    (tmp_path / "killed").mkdir()
    with Notebook(tmp_path / "unbroken") as notebook:
        notebook.start()
        unbroken = weights_of(notebook.on_ranks(_BUILD + "PAUSE = 0\n" + _TRAIN))
    with Notebook(tmp_path / "killed") as notebook:
        notebook.start()
        notebook.send(f"%%distributed --checkpoint every=5\n{_BUILD}PAUSE = 0.1\n{_TRAIN}")
        folder = tmp_path / "killed" / ".nbdist" / "checkpoints"
        wait_for(lambda: list(folder.glob("*/step-*[27]5/checkpoint.json")), "checkpoints", 90.0)
        family = Family(notebook.pid)
        os.kill(notebook.pid, signal.SIGKILL)
        family.assert_gone()
    with Notebook(tmp_path / "killed") as notebook:
        notebook.start()
        said = notebook.on_ranks(f"{_BUILD}print(nbdist.restore())\nPAUSE = 0\n{_TRAIN}")
        assert re.search(r"Restored step (25|30|75|80)\b", said), said
        assert weights_of(said) == unbroken
