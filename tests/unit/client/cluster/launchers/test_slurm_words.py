"""What Slurm is asked for, and what its messages mean."""

from pathlib import Path

import pytest

from nbdist.client.cluster.launchers.base import LaunchOptions
from nbdist.client.cluster.launchers.slurm_words import (
    Options,
    explain,
    job_name,
    never_starts,
    read_wish,
    waiting_line,
)
from nbdist.shared.errors import UsageError


def test_five_ranks_on_two_nodes_take_three_slots_each() -> None:
    wish = read_wish(LaunchOptions(Options(nodes=2), n=5), {})
    assert wish.options == ("--nodes=2", "--ntasks-per-node=3")
    assert wish.slots_of(2) == 3


@pytest.mark.parametrize(
    ("line", "slots"),
    [
        ("--gpus-per-node=a100:4", 4),
        ("#SBATCH --gres gpu:2", 2),
        ("--ntasks-per-node=3", 3),
        ("--mem=4G", 1),
    ],
)
def test_ranks_a_node_follow_from_the_persons_own_options(line: str, slots: int) -> None:
    assert read_wish(LaunchOptions(Options(nodes=2, sbatch=(line,))), {}).slots_of(2) == slots


def test_a_template_gives_options_and_lines_for_each_node(tmp_path: Path) -> None:
    file = tmp_path / "gpu.sh"
    file.write_text(
        "#!/bin/bash\n#SBATCH --mem=4G # enough\n#SBATCH -o out.txt\n# modules\nmodule load cuda\n"
    )
    wish = read_wish(LaunchOptions(Options(nodes=1, sbatch=(str(file),))), {})
    assert wish.options == ("--nodes=1", "--mem=4G")
    assert wish.before == ("module load cuda",)


def test_a_notebook_within_a_job_takes_its_nodes_unless_it_asks_for_others() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    within = read_wish(LaunchOptions(Options()), job)
    assert (within.allocates, within.slots_of(2)) == (False, 4)
    assert read_wish(LaunchOptions(Options(nodes=2)), job).allocates
    assert read_wish(LaunchOptions(Options()), {}).allocates


def test_a_line_that_is_neither_option_nor_file_is_refused() -> None:
    with pytest.raises(UsageError, match="is an option of Slurm or a file"):
        read_wish(LaunchOptions(Options(sbatch=("mem=4G",))), {})


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (
            "slurmstepd: error: *** STEP 3.0 ON b CANCELLED AT 2026-11-24T13:17 DUE TO TIME LIMIT",
            "its allocation has reached its time limit",
        ),
        ("slurmstepd: error: *** STEP 1.0 ON b CANCELLED AT 2026-11-24T13:06 ***", "cancelled"),
        ("srun: error: Node failure on c", "Slurm has taken the node down"),
        ("salloc: error: invalid partition specified: x", "Slurm has no partition x"),
        ("env: 'salloc': No such file or directory", "salloc is not on this machine"),
        ("salloc: error: Invalid --time specification", "Invalid --time specification"),
        ("", "the command ended with exit code 3"),
    ],
)
def test_a_message_of_slurms_is_told_in_words(said: str, means: str) -> None:
    assert means in explain(3, said)[0]


def test_a_job_that_waits_is_told_from_one_that_never_starts() -> None:
    assert never_starts("Priority") is None
    assert never_starts("PartitionTimeLimit") == "the partition's time limit is shorter"
    assert waiting_line("12", "PENDING", "Priority", "2026-11-24T14:02:09") == (
        "pending: job 12, Priority, starts about 2026-11-24 14:02"
    )
    assert waiting_line("12", "PENDING", "Resources", "N/A") == "pending: job 12, Resources"


def test_a_jobs_name_is_the_notebooks_and_its_own() -> None:
    assert job_name("my nötebook", "a1") == "nbdist-my-n-tebook-a1"
