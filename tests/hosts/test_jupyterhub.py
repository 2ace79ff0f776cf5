"""The recipe of docs/jupyterhub.md: a hub whose servers are jobs of Slurm, and ranks in them."""

import re

import pytest

from tests.groups import ROOT
from tests.hosts.hub import Hub
from tests.hosts.install import HUB
from tests.hosts.slurm import Slurm
from tests.hosts.waiting import wait_until

pytestmark = pytest.mark.hosts

PAGE = ROOT / "docs" / "jupyterhub.md"
START = "%dist start --launcher slurm --trust-network"
WHERE = """\
%%distributed
import os
x = torch.ones(1) * rank
dist.all_reduce(x)
print("node", os.uname().nodename, "job", os.environ["SLURM_JOB_ID"], "sum", x.item())
"""
TRAIN_UNTIL_TOLD = """\
%%distributed --checkpoint every=100000
import subprocess, time
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
while True:
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    if rank == 0 and optimizer.state[next(model.parameters())]["step"] == 5:
        # What Slurm does 60 s before the job's end.
        subprocess.run(["scancel", "--signal=URG", os.environ["SLURM_JOB_ID"]], check=True)
"""


def test_a_hubs_notebook_trains_in_its_job_or_in_another_and_its_end_leaves_nothing(
    slurm: Slurm,
) -> None:
    if not (HUB / "bin" / "jupyterhub").exists():
        pytest.skip("JupyterHub is not installed (make test-hosts)")
    folder = slurm.bed.shared / "hub"
    folder.mkdir()
    cells = [
        f"%cd {folder}\n%load_ext nbdist\n{START} --nodes 2 --time 5",
        WHERE,
        f"%dist stop\n{START}",
        WHERE,
        TRAIN_UNTIL_TOLD,
        WHERE,  # its ranks, and their job, are there when the server ends
    ]
    with Hub(slurm, recipe() + here(folder), folder) as hub:
        hub.start_server()
        (job,) = slurm.jobs()
        assert job.endswith("RUNNING b,c")

        said = hub.run(cells)

        nodes = [set(re.findall(r"node (\w) job (\d+) sum 1.0", text)) for text in said]
        (hubs,) = {number for _, number in nodes[3]}
        (own,) = {number for _, number in nodes[1]}
        assert int(own) == int(hubs) + 1, said
        assert {node for node, _ in nodes[1]} == {"a", "b"}, said
        assert nodes[3] == nodes[5] == {("b", hubs), ("c", hubs)}, said
        assert f"The time of job {hubs} is over in 60 s. The training was saved" in said[4]
        assert [line for line in slurm.left_running() if "nbdist.host" in line]

        hub.stop_server()

        wait_until(lambda: slurm.jobs() == [] and slurm.left_running() == [], "all ends")


def recipe() -> str:
    """Return the settings of the page, as a person copies them."""
    (settings,) = re.findall(r"```python\n(import batchspawner.*?)```", PAGE.read_text(), re.DOTALL)
    return str(settings)


def here(folder: object) -> str:
    """Return what is this cluster's own: the partition, nodes without GPUs, the environment."""
    prologue = f"export PATH={HUB}/bin:$PATH JUPYTER_PATH={folder} PYTHONPATH={ROOT}"
    return f"""
c.SlurmSpawner.req_partition = "main"
options = c.SlurmSpawner.req_options
c.SlurmSpawner.req_options = options.replace("--ntasks-per-node=4 --gres=gpu:4", "--exclude=a")
c.SlurmSpawner.req_prologue = {prologue!r}
"""
