"""A cluster on Slurm's nodes: the wait in the queue, the ranks' places, and all ways to its end."""

import os
import re
import signal
import sys

import pytest

from tests.hosts.kernel import Kernel
from tests.hosts.slurm import Slurm
from tests.hosts.waiting import wait_until

pytestmark = pytest.mark.hosts

LOAD = "%load_ext nbdist\n"
START = "%dist start --launcher slurm --trust-network --sbatch=--exclude=a "
# What a group of one's own has: a template activates the environment, and says the rest.
TEMPLATE = f"""\
#!/bin/bash
#SBATCH --time=5
#SBATCH --nodes=2
#SBATCH --output=never-%j.txt
export PATH={sys.prefix}/bin:$PATH FLAVOUR=vanilla
"""
LOOK = """\
import os, signal, subprocess
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "FLAVOUR", "CUDA_VISIBLE_DEVICES")
seen = (os.uname().nodename, *(os.environ.get(name) for name in names))
# Schedulers send it to every process of a job; what a cell starts ends by it, as ever.
os.kill(os.getpid(), signal.SIGTERM)
ended = subprocess.run(["sh", "-c", "kill -TERM $$"]).returncode
leaked = [name for name in os.environ if name.startswith(("SLURM_PROCID", "SLURM_NTASKS", "PMI"))]
"""
TRAIN = """\
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
total = sum(p.sum().item() for p in model.parameters())
"""
MODEL = """\
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
"""
FOR_EVER = f"""{MODEL}
import time
print("training")
while True:
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""
QUEUED = "--nodes=2 --sbatch=--begin=now+3600"


def test_ranks_of_two_nodes_train_as_one_and_leave_no_job(slurm: Slurm) -> None:
    slurm.bed["a"].write("gpus.sh", TEMPLATE)
    with Kernel(slurm.bed["a"]) as kernel:
        said = kernel.run(LOAD + START + "--gpus-per-node 2 --device cpu --sbatch gpus.sh")
        assert "Started 4 ranks on cpu" in said
        assert [job.split()[1][:7] for job in slurm.jobs()] == ["nbdist-"]
        kernel.run("%%distributed\n" + LOOK + TRAIN)
        kernel.run("%dist pull seen leaked total ended")
        assert kernel.run("for one in seen: print(*one)").splitlines() == [
            "b 0 0 2 0 vanilla 0,1",
            "b 1 1 2 0 vanilla 0,1",
            "c 2 0 2 1 vanilla 0,1",
            "c 3 1 2 1 vanilla 0,1",
        ]
        assert kernel.run("print(leaked, len(set(total)), *ended)") == (
            "[[], [], [], []] 1 -15 -15 -15 -15\n"
        )
        assert kernel.run("%dist stop").strip() == "Stopped."
    wait_until(lambda: slurm.jobs() == [] and slurm.left_running() == [], "all ends")


def test_a_notebook_within_a_job_takes_its_nodes_and_loses_them_with_it(slurm: Slurm) -> None:
    job = slurm.submit(["--nodes=2", "--nodelist=a,b", "--time=5", "--wrap=sleep 600"])
    wait_until(lambda: "RUNNING" in slurm.jobs()[0], "the job runs")
    variables = f"SLURM_JOB_ID='{job}', SLURM_NTASKS='7', SLURM_NTASKS_PER_NODE='1'"
    with Kernel(slurm.bed["b"]) as kernel:
        kernel.run(f"import os\nos.environ.update({variables})\n" + LOAD)
        said = kernel.run("%dist start --launcher slurm --trust-network")
        assert "Started 2 ranks" in said
        kernel.run("%%distributed\nimport os\nseen = os.uname().nodename")
        kernel.run("%dist pull seen")
        # Rank 0 is on the notebook's machine.
        assert kernel.run("print(*seen)") == "b a\n"

        slurm.run(["scancel", job])

        said = kernel.run("%%distributed\nimport time\ntime.sleep(60)")
        assert "died: its host b is lost: its job was cancelled" in said


@pytest.mark.parametrize("number", ["TERM", pytest.param("URG", marks=pytest.mark.slow)])
def test_a_training_is_saved_when_its_job_is_about_to_end(slurm: Slurm, number: str) -> None:
    def end_job(text: str) -> None:
        if "training" in text and not told:
            told.append(slurm.jobs()[0].split()[0])
            # What Slurm does before a time limit, and for a preemption.
            slurm.run(["scancel", *(["--signal=URG"] if number == "URG" else []), *told])

    told: list[str] = []
    # Checkpoints lie in the notebook's folder, which all nodes must see.
    folder = slurm.bed.shared / f"notebook-{number}"
    folder.mkdir()
    with Kernel(slurm.bed["a"]) as kernel:
        kernel.run(f"%cd {folder}\n" + LOAD)
        assert "Started 2 ranks" in (said := kernel.run(START + "--nodes 2")), said
        said = kernel.run("%%distributed --checkpoint every=100000\n" + FOR_EVER, watch=end_job)
        assert told, said
        why = "The time of job {} is over in 60 s." if number == "URG" else "Slurm ends job {}."
        assert why.format(*told) + " The training was saved, and the cell was stopped." in said
        found = re.search(r"step (\d+) is in (\S+)\.\n", said)
        assert found is not None, said
        if number == "TERM":
            wait_until(lambda: slurm.jobs() == [], "Slurm ends the job")
            kernel.run("%dist stop")
            kernel.run(START + "--nodes 2")
        kernel.run(f"%%distributed\n{MODEL}nbdist.restore()\n")
        kernel.run("%%distributed\nstep = next(iter(optimizer.state.values()))['step'].item()")
        kernel.run("%dist pull step")
        assert kernel.run("print(step)") == f"[{found[1]}.0, {found[1]}.0]\n"


def test_a_node_that_fails_takes_its_rank_and_a_killed_kernel_the_job(slurm: Slurm) -> None:
    with Kernel(slurm.bed["a"]) as kernel:
        kernel.run(LOAD + START + "--nodes 2")
        kernel.run("%%distributed\nx = rank + 10")

        slurm.node_down("c")

        said = kernel.run(
            "%%distributed\nimport time\nfor _ in range(600):\n"
            "    dist.all_reduce(torch.ones(1))\n    time.sleep(0.1)"
        )
        assert "rank 1 (c, cpu) died: its host c is lost: it did not answer for 4 s" in said
        kernel.run("%dist pull x -r 0")
        assert kernel.run("print(x)") == "[10]\n"
        assert "RUNNING" in slurm.jobs()[0]

        os.kill(kernel.pid, signal.SIGKILL)

        # The job itself waits until Slurm knows that the node is gone.
        wait_until(lambda: not [job for job in slurm.jobs() if "COMPLETING" not in job], "it ends")
        wait_until(lambda: slurm.bed["b"].left_running() == [], "the ranks end")


def test_the_wait_in_the_queue_is_shown_and_ends_with_an_interrupt(slurm: Slurm) -> None:
    with Kernel(slurm.bed["a"]) as kernel:
        kernel.run(LOAD)

        def interrupt(text: str) -> None:
            if "starts about" in text and not jobs:
                jobs.extend(slurm.jobs())
                os.kill(kernel.pid, signal.SIGINT)

        jobs: list[str] = []
        said = kernel.run(START + QUEUED, watch=interrupt)

        assert slurm.jobs() == []
        assert f"pending: job {jobs[0].split()[0]}, BeginTime, starts about 20" in said
        assert "%dist start was stopped" in said


def test_a_killed_kernel_takes_its_job_out_of_the_queue(slurm: Slurm) -> None:
    with Kernel(slurm.bed["a"]) as kernel:
        kernel.run(LOAD)
        start = (START + QUEUED).removeprefix("%")
        kernel.run(
            "import threading\nthreading.Thread(target=get_ipython().run_line_magic, "
            f"args={tuple(start.split(maxsplit=1))!r}, daemon=True).start()"
        )
        wait_until(lambda: "PENDING" in "".join(slurm.jobs()), "the job is in the queue")

        os.kill(kernel.pid, signal.SIGKILL)

        wait_until(lambda: slurm.jobs() == [], "it is taken out")


def test_what_slurm_cannot_give_is_one_sentence_and_leaves_nothing(slurm: Slurm) -> None:
    wrong = {
        "--nodes 2 --partition gpus": "Slurm has no partition gpus.",
        "--nodes 9": "would never start: the partition has not so many nodes",
        "--nodes 2 --gpus-per-node 9": "no nodes of the partition have what was asked for.",
        "--nodes 2 --sbatch=--foo": "salloc does not know the option --foo.",
        "--nodes 2 --time soon": "Invalid --time specification.",
        "--nodes 0": "nodes must be at least 1, not 0.",
        "--nodes 2 --sbatch mem=4": "--sbatch is an option of Slurm or a file of #SBATCH lines",
        "--hosts a,b": "hosts is for launcher ssh or mpi, not slurm.",
    }
    slurm.run(["scontrol", "update", "PartitionName=main", "MaxTime=10"])
    wrong["--nodes 2 --time 20"] = "time limit is shorter"
    with Kernel(slurm.bed["a"]) as kernel:
        kernel.run(LOAD)
        for options, sentence in wrong.items():
            said = kernel.run(START + options)
            assert sentence in said, said
            assert slurm.jobs() == []
        kernel.run("import os\nos.environ['PATH'] = '/nowhere'")
        assert "salloc is not on this machine." in kernel.run(START + "--nodes 2")
    slurm.run(["scontrol", "update", "PartitionName=main", "MaxTime=INFINITE"])


def test_a_job_at_its_time_limit_is_saved_and_told(slurm: Slurm) -> None:
    told: list[str] = []

    def shorten(text: str) -> None:
        if "training" in text and not told:
            told.append(slurm.jobs()[0].split()[0])
            slurm.run(["scontrol", "update", f"JobId={told[0]}", "EndTime=now+5"])

    folder = slurm.bed.shared / "notebook-limit"
    folder.mkdir()
    with Kernel(slurm.bed["a"]) as kernel:
        kernel.run(f"%cd {folder}\n" + LOAD + START + "--nodes 2 --time 5")
        # Slurm looks at limits every 30 s.
        said = kernel.run("%%distributed --checkpoint every=100000\n" + FOR_EVER, watch=shorten)
        assert re.search(rf"(of|ends) job {told[0]}.* The training was saved", said), said
        assert said.count("Error: ") == 1
        wait_until(lambda: slurm.jobs() == [], "Slurm ends the job")
        said = kernel.run("%%distributed\nimport time\ntime.sleep(60)")
        assert "its allocation has reached its time limit" in said, said
        assert said.count("Error: ") == 1
        assert kernel.run("%dist stop").strip() == "Stopped."
    wait_until(lambda: slurm.left_running() == [], "all ends, and what sent to MLflow")


def test_slurms_controller_may_be_away_while_ranks_train_and_is_told_of_at_a_start(
    slurm: Slurm,
) -> None:
    with Kernel(slurm.bed["a"]) as kernel:
        kernel.run(LOAD + START + "--nodes 2")
        (job,) = (line.split()[0] for line in slurm.jobs())
        slurm.stop_controller()

        kernel.run("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nx = x.item()")
        kernel.run("%dist pull x")
        assert kernel.run("print(x)") == "[2.0, 2.0]\n"
        said = kernel.run("%dist stop")
        assert f"Job {job} may still hold its nodes, for Slurm's controller does not answer" in said
        assert not [line for line in slurm.left_running() if "nbdist." in line]
        said = kernel.run(START + "--nodes 2")
        assert "Slurm gave no nodes: Slurm's controller (slurmctld) does not answer." in said
        assert not [line for line in slurm.left_running() if "salloc" in line]

        slurm.start_controller()
        # Slurm itself may have ended the job by now, whose nodes run nothing; there is no other.
        assert {line.split()[0] for line in slurm.jobs()} <= {job}


def test_a_wait_in_the_queue_goes_on_when_slurms_controller_comes_back(slurm: Slurm) -> None:
    away: list[str] = []

    def restart(text: str) -> None:
        if "starts about" in text and not away:
            away.append(slurm.jobs()[0].split()[0])
            slurm.stop_controller()
        elif "controller does not answer" in text and len(away) == 1:
            slurm.start_controller()
            slurm.run(["scontrol", "update", f"JobId={away[0]}", "StartTime=now"])
            away.append("back")

    with Kernel(slurm.bed["a"]) as kernel:
        kernel.run(LOAD)
        said = kernel.run(START + QUEUED, watch=restart)
        assert away[1:] == ["back"], said
        assert "Started 2 ranks" in said
        assert kernel.run("%dist stop").strip() == "Stopped."
    wait_until(lambda: slurm.jobs() == [], "the job ends")
