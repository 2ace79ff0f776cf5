"""`nbdist.init()`: a script of torchrun's finds what a cell finds, or is told what it lacks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.engine.rank import standalone
from nbdist.shared.errors import UsageError
from tests.export.torchrun import HANG_S, ROOT, torchrun

TRAIN = """
import os, random, nbdist, torch, torch.distributed as dist

rank, local_rank, world_size, device = nbdist.init(layouts=["ddp"], threads=1)
assert nbdist.init() == (rank, local_rank, world_size, device)
assert (rank, world_size) == (dist.get_rank(), 2) and local_rank == rank
assert torch.get_num_threads() == 1
seeds = [None, None]
dist.all_gather_object(seeds, torch.initial_seed())
assert seeds[0] != seeds[1]
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.randint(2, (60,)))
for x, y in nbdist.loader(data, global_batch=16, drop_last=True):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
nbdist.log(rows=float(len(x)))
assert str(nbdist.coverage()).endswith("Each sample once: 48 in 1 epoch.")
before = model.weight.detach().clone()
nbdist.save("kept")
with torch.no_grad():
    model.weight.zero_()
nbdist.restore("kept")
assert torch.equal(model.weight, before)
nbdist.emulate_link(1e9)
assert nbdist.received_bytes() > 0
try:
    nbdist.publish(model, "digits", example=x)
except nbdist.PublishError as error:
    assert "There is no notebook here" in str(error)
else:
    raise AssertionError
dist.destroy_process_group()
"""


def test_a_script_of_torchrun_has_what_a_cell_has(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    ran = torchrun(script, 2, NBDIST_RECORDS=str(tmp_path / "records"))
    assert ran.returncode == 0, ran.stderr
    assert "step 3: rows 8" in ran.stdout
    assert ran.stdout.count("1 checkpoint saved, the newest of step 3") == 1
    for rank in range(2):
        lines = (tmp_path / "records" / f"rank-{rank}.jsonl").read_text().splitlines()
        steps = [row for row in map(json.loads, lines) if row["kind"] == "step"]
        assert [row["step"] for row in steps] == [1, 2, 3]
        assert all(row["values"]["loss"] > 0 for row in steps)


STAGES = """
import os, nbdist, torch

rank, *_ = nbdist.init(layouts=["pp=2"], threads=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
layout = nbdist.parallelize(model, "pp=2", nbdist.Pipeline(microbatches=2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randint(2, (8,))
for step in range(3):
    loss = layout.step(x, y, torch.nn.functional.cross_entropy)
    optimizer.step()
    optimizer.zero_grad()
    if loss is not None:
        nbdist.log(loss=loss)
    if step == 1 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("of the first start")
nbdist.log(both=1.0)
"""


@pytest.mark.slow
def test_a_loss_that_rank_0_has_not_is_printed_once_also_when_torchrun_starts_again(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(STAGES)
    ran = torchrun(script, 2, max_restarts=1)
    assert ran.returncode == 0, ran.stderr
    assert "ValueError: of the first start" in ran.stderr
    last = ran.stdout.splitlines()[2:]  # of the second start
    assert sorted(re.sub(r"loss [\d.]+", "loss L", line) for line in last) == [
        *("step 1: loss L", "step 2: loss L", "step 3: both 1.00", "step 3: loss L")
    ]


def test_a_worker_that_imports_the_script_does_not_join_but_says_what_to_write(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing as mp, sys, nbdist\n"
        "if __name__ == '__main__':\n"
        "    worker = mp.get_context('spawn').Process(target=print)\n"
        "    worker.start(); worker.join(); sys.exit(worker.exitcode)\n"
        "nbdist.init()\n"
    )
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    ran = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT), **told},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ran.returncode == 1
    assert "nbdist.init() is called once more, in a process that this script" in ran.stderr
    assert 'Do:  put nbdist.init() and all that trains below `if __name__ == "__main__":`' in (
        ran.stderr
    )


@pytest.mark.slow
def test_a_layout_that_cannot_have_these_ranks_ends_the_script_with_one_error(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text('import nbdist\nnbdist.init(layouts=["ddp", "fsdp=2 tp=2"])\nprint("ran")\n')
    ran = torchrun(script, 2)
    assert ran.returncode == 1
    assert ran.stderr.count("LayoutError: fsdp=2 x tp=2 needs 4 ranks") == 1
    assert (
        "Do:  torchrun --nproc-per-node 4 train.py    "
        '(or let nbdist fill one in: "fsdp=-1 tp=2" gives fsdp=1)'
    ) in ran.stderr
    assert "cluster" not in ran.stderr
    assert "ran" not in ran.stdout


def test_a_process_that_torchrun_has_not_started_is_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["/home/ada/train.py"])
    with pytest.raises(UsageError) as caught:
        standalone._place({"WORLD_SIZE": "2"})
    assert caught.value.why == "RANK is not set."
    assert caught.value.do.startswith("torchrun --nproc-per-node 2 train.py")


def test_a_rank_knows_its_place_on_one_host_and_on_several() -> None:
    one = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    rank, place = standalone._place({**one, "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"})
    assert (rank, place.host, place.address, place.local_rank) == (1, "localhost", "127.0.0.1", 1)
    far = {**one, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    rank, place = standalone._place({**far, "MASTER_ADDR": "127.0.0.1"})
    assert (place.host, place.node, place.nodes, place.local_size) == ("node 1", 1, 2, 1)
