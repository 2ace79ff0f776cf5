"""Slurm and MPI run on the test hosts, as far as the tests of the launchers rely on it."""

import pytest

from tests.hosts import mpi, requirements
from tests.hosts.bed import Bed
from tests.hosts.slurm import Slurm
from tests.hosts.waiting import wait_until

pytestmark = pytest.mark.hosts


def test_srun_runs_on_three_hosts(slurm: Slurm) -> None:
    shown = slurm.run(["srun", "--nodes=3", "hostname"]).stdout

    assert sorted(shown.split()) == ["a", "b", "c"]
    wait_until(lambda: slurm.left_running() == [], "its steps end")


def test_a_job_sees_the_gpus_it_asked_for(slurm: Slurm) -> None:
    ask = ["srun", "--nodes=2", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES"]
    assert slurm.run(ask).stdout.split() == ["0,1", "0,1"]


def test_a_job_is_queued_shown_and_cancelled(slurm: Slurm) -> None:
    slurm.submit(["--nodes=4", "--wrap=srun sleep 600"])
    wait_until(lambda: [line.split()[2] for line in slurm.jobs()] == ["RUNNING"], "it starts")

    slurm.run(["scancel", "--user=root"])

    wait_until(lambda: slurm.jobs() == [] and slurm.left_running() == [], "it ends")


def test_a_job_for_a_partition_that_does_not_exist_is_refused(slurm: Slurm) -> None:
    done = slurm.run(["sbatch", "--partition=gpus", "--wrap=true"], check=False)
    assert "invalid partition specified: gpus" in done.stderr


def test_a_job_without_kill_survives_the_loss_of_a_node(slurm: Slurm) -> None:
    step = "srun --no-kill --kill-on-bad-exit=0 sleep 600"
    slurm.submit(["--nodes=3", "--no-kill", f"--wrap={step}"])
    wait_until(
        lambda: all("sleep" in " ".join(slurm.bed[name].left_running()) for name in "abc"),
        "the job runs on all three",
    )

    slurm.node_down("c")

    wait_until(lambda: "down" in slurm.node_states()["c"], "Slurm notices it")
    assert [line.split()[2] for line in slurm.jobs()] == ["RUNNING"]
    assert "sleep" in " ".join(slurm.bed["b"].left_running())


@pytest.mark.parametrize("kind", mpi.KINDS)
def test_mpi_runs_two_ranks_on_each_of_three_hosts(bed: Bed, kind: mpi.Kind) -> None:
    if kind == "openmpi" and (why := requirements.missing_for_mpi()):
        pytest.skip(why)
    hosts = [bed[name] for name in "abc"]
    who = f'echo "$(hostname) ${mpi.RANK[kind]} ${mpi.LOCAL_RANK[kind]}"'

    shown = mpi.run(kind, hosts, ["bash", "-c", who], ranks_per_host=2).stdout

    assert sorted(shown.splitlines()) == ["a 0 0", "a 1 1", "b 2 0", "b 3 1", "c 4 0", "c 5 1"]
