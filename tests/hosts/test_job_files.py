"""The batch script of an exported training on Slurm's nodes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.client.export.jobs import Job, files
from tests.groups import TESTS
from tests.hosts.slurm import Slurm
from tests.hosts.waiting import wait_until

pytestmark = pytest.mark.hosts


def test_a_batch_script_on_two_nodes_gives_the_losses_of_one_machine(
    slurm: Slurm, tmp_path: Path
) -> None:
    folder = slurm.bed.shared / "job"
    folder.mkdir()
    for file in ("train.py", "problem.py"):
        shutil.copy(TESTS / "jobs" / file, folder)
    job = Job(
        "train.py",
        1,
        nodes=2,
        arguments=("losses.txt",),
        time_limit="5",
        partition="main",
        sbatch=("--exclude=a",),
        before=(f"export PATH={Path(sys.executable).parent}:$PATH",),
    )
    ((name, text),) = files("sbatch", job).items()
    (folder / name).write_text(text)

    number = slurm.submit([f"--chdir={folder}", str(folder / name)])
    wait_until(lambda: not slurm.jobs(), "the job ends", timeout_s=120)
    told = (folder / f"train-{number}.log").read_text()
    assert (folder / "losses.txt").exists(), told
    assert "--ntasks-per-node=1" in text

    here = tmp_path / "losses.txt"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    train = [sys.executable, *words, str(folder / "train.py"), str(here)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    subprocess.run(train, env=environment, check=True, timeout=120)
    assert (folder / "losses.txt").read_text() == here.read_text()
    assert re.match(r"2\n(0x\S+\n?){10}$", here.read_text())
