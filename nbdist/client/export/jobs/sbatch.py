"""Slurm: a batch script with one `torchrun` a node. Pure."""

import shlex

from nbdist.client.export.jobs.file_text import comment, exports, pip_install, torchrun
from nbdist.client.export.jobs.job import Job

HELP = "a batch script for Slurm"
WORDS: tuple[str, ...] = ("--time", "--partition", "--sbatch")

# Several jobs may share a node, hence not one port for all.
_PORT = '"$((20000 + SLURM_JOB_ID % 10000))"'


def files(job: Job) -> dict[str, str]:
    """Return the batch script."""
    file = f"{job.stem}.sbatch"
    heading = comment(
        [
            f"Runs {job.script} on {job.world_size} ranks. In its folder, which the nodes share:",
            f"    sbatch {file}",
        ]
    )
    first = (
        []
        if job.nodes == 1
        else [
            'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'export HEAD="${nodes[0]}"',
        ]
    )
    line = torchrun(job, head='"$HEAD"', node='"$SLURM_NODEID"', port=_PORT)
    start = (
        "# SLURM_NODEID is each node's own, hence a shell there.\n"
        f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(line)}"
    )
    body = ["set -euo pipefail", *job.before, *exports(job), *pip_install(job), *first, start]
    directives = "\n".join(f"#SBATCH {option}" for option in _options(job))
    return {file: "\n".join(["#!/bin/bash", heading + directives, "", *body, ""])}


def _options(job: Job) -> list[str]:
    chosen = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cores_per_node,
        "mem": job.memory_gib and f"{job.memory_gib}G",
        "partition": job.partition,
        "time": job.time_limit,
        "output": f"{job.name}-%j.log",
    }
    ours = [f"--{name}={value}" for name, value in chosen.items() if value]
    # Slurm takes the last of two equal options: the person's.
    return ours + [option.removeprefix("#SBATCH").strip() for option in job.sbatch]
