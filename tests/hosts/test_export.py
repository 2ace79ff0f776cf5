"""Cells that left the notebook: their script and its job file on Slurm's nodes."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from nbdist.client.export.cells import NotebookCell
from nbdist.client.export.export import ExportRequest, export
from nbdist.client.notebook.arguments import parse_dist, parse_distributed
from tests.export.torchrun import ROOT, torchrun
from tests.hosts.slurm import Slurm
from tests.hosts.waiting import wait_until

pytestmark = pytest.mark.hosts

TRAIN = """\
%%distributed -p lr=0.1
import json

torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
nbdist.parallelize(model, "dp=2")
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
losses = []
for x, y in nbdist.loader(data, global_batch=16):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
nbdist.save("kept", wait=True)
with open(f"losses-{rank}.json", "w") as file:
    json.dump(losses, file)
"""


def test_an_exported_job_on_two_nodes_has_the_losses_of_one_machine(
    slurm: Slurm, tmp_path: Path
) -> None:
    folder = slurm.bed.shared / "exported"
    folder.mkdir()
    site = folder / "site.sh"
    site.write_text(
        f"#SBATCH --exclude=a\nexport PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}\n"
    )
    start = (
        "%dist start --launcher slurm --nodes 2 -n 2 --device cpu --threads 1 --time 5 "
        f"--partition main --sbatch={site}"
    )
    cells = [NotebookCell(1, start), NotebookCell(2, TRAIN)]
    request = ExportRequest(folder / "train.py", format="sbatch")
    made = export(request, cells, parse_dist, parse_distributed)
    assert made.script.needs_nbdist

    number = slurm.submit([f"--chdir={folder}", str(folder / "train.sbatch")])
    wait_until(lambda: not slurm.jobs(), "the job ends", timeout_s=120)
    told = (folder / f"train-{number}.log").read_text()
    assert (folder / "losses-1.json").exists(), told
    assert (folder / ".nbdist" / "checkpoints" / "kept" / "latest").exists()

    shutil.copy(folder / "train.py", tmp_path)
    ran = torchrun(tmp_path / "train.py", 2)
    assert ran.returncode == 0, ran.stderr
    for rank in range(2):
        there = json.loads((folder / f"losses-{rank}.json").read_text())
        here = json.loads((tmp_path / f"losses-{rank}.json").read_text())
        assert len(there) == 4
        assert there == here
