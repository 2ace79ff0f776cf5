"""Checkpoints where processes die: a rank in the midst of its save, and the notebook's kernel."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from nbdist.engine.checkpoint.folder import CheckpointFolder
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
        said = notebook.on_ranks(_BUILD + _ONE_STEP + "nbdist.save(wait=True)", "--no-track")
        assert "1 checkpoint saved, the newest of step 1" in said
        said = notebook.on_ranks(_ONE_STEP + _DIES_IN_ITS_SAVE, "--no-track")
        assert "rank 1 (localhost, cpu) died: killed by SIGKILL" in said
        assert "The checkpoint of step 2 was not written: rank 1 died." in said
        run = next((tmp_path / ".nbdist" / "checkpoints").iterdir())
        assert (run / "latest").read_text() == "step-00000001"

        said = notebook.on_ranks(
            _BUILD + "print(nbdist.restore().step)\n" + _ONE_STEP, "--no-track"
        )
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


# Each step is noted before the next begins: its samples, and what the weights have come to.
_NOTES = """
import json, time, zlib
numbers = {tuple(row.tolist()): i for i, row in enumerate(loader.dataset.tensors[0])}
found = nbdist.restore("run", missing_ok=True)
made = found.step if found else 0
with open(f"{LOG}-{rank}", "a", buffering=1) as lines:
    while loader.epoch < 2:
        for x, y in loader:
            (model(x) - y).pow(2).mean().backward()
            opt.step(); opt.zero_grad()
            made += 1
            mine = 0
            for p in model.parameters():
                mine = zlib.crc32(p.to_local().detach().numpy().tobytes(), mine)
            samples = [numbers[tuple(row.tolist())] for row in x]
            lines.write(json.dumps({"step": made, "samples": samples, "sum": mine}) + "\\n")
            if made % 4 == 0:
                nbdist.save("run", keep=2)
"""
_STEPS, _DEATHS = 100, 10


def _noted(log: Path, rank: int) -> list[dict[str, Any]]:
    path = Path(f"{log}-{rank}")
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_kernel_killed_at_any_moment_loses_no_checkpoint_and_no_sample(tmp_path: Path) -> None:
    cell = f"LOG = 'unbroken'\n{_BUILD}{_NOTES}"
    (tmp_path / "whole").mkdir()
    with Notebook(tmp_path / "whole") as notebook:
        notebook.start()
        began = time.monotonic()
        notebook.on_ranks(cell)
        seconds = time.monotonic() - began
    unbroken = [_noted(tmp_path / "whole" / "unbroken", rank) for rank in (0, 1)]
    assert [len(steps) for steps in unbroken] == [_STEPS, _STEPS]

    drawn, newest = random.Random(16), 0
    place = CheckpointFolder(str(tmp_path / ".nbdist" / "checkpoints" / "run"))
    for death in range(_DEATHS + 1):
        log = tmp_path / f"log-{death}"
        with Notebook(tmp_path) as notebook:
            notebook.start()
            cell = f"LOG = {str(log)!r}\n{_BUILD}{_NOTES}"
            if death == _DEATHS:
                said = notebook.on_ranks(cell)
                assert "Error" not in said, said
            else:
                notebook.send(f"%%distributed\n{cell}")
                time.sleep(drawn.random() * seconds / 8)  # whenever it is, it must be survived
                family = Family(notebook.pid)
                os.kill(notebook.pid, signal.SIGKILL)
                family.assert_gone()
        for rank in (0, 1):
            steps = _noted(log, rank)
            if steps:
                first = steps[0]["step"]
                assert first == newest + 1
                assert steps == unbroken[rank][newest : newest + len(steps)]
        committed, damaged = place.survey()
        assert damaged == []
        for name, commit in committed.items():
            assert place.damage(name, commit, commit.files).found == ()
        counts = max((commit.step for commit in committed.values()), default=0)
        assert counts >= newest
        newest = counts
    assert newest == _STEPS
