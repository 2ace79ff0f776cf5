"""SkyPilot: a task for any cloud, Kubernetes or Slurm that it knows. Pure."""

from typing import Any, Final

from nbdist.client.export.jobs.file_text import pip_install, torchrun, yaml_file
from nbdist.client.export.jobs.job import Job

HELP = "a task for SkyPilot"
WORDS: tuple[str, ...] = ("--time",)

_GPUS: Final = ("H100", "A100-80GB", "A100", "L4")


def files(job: Job) -> dict[str, str]:
    """Return the task."""
    file = f"{job.stem}-sky.yaml"
    heading = [
        f"Runs {job.script} on {job.world_size} ranks. Its folder is copied to the nodes; there:",
        f"    sky launch -c {job.name} {file}",
    ]
    if job.gpus_per_node:
        heading.append("Of the accelerators any will do; SkyPilot takes the cheapest.")
    return {file: yaml_file(heading, _task(job))}


def _task(job: Job) -> dict[str, Any]:
    head = ['head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'] if job.nodes > 1 else []
    start = torchrun(job, head='"$head"', node='"$SKYPILOT_NODE_RANK"')
    if job.time_limit_s:
        start = f"timeout {job.time_limit_s} {start}"
    return {
        "name": job.name,
        "num_nodes": job.nodes,
        "workdir": ".",
        "resources": {
            "accelerators": dict.fromkeys(_GPUS, job.gpus_per_node) if job.gpus_per_node else None,
            "cpus": _at_least(job.cores_per_node or (not job.gpus_per_node and job.ranks_per_node)),
            "memory": _at_least(job.memory_gib),
            "image_id": f"docker:{job.image}" if job.image else None,
        },
        "envs": dict(job.environment),
        "setup": "\n".join(["set -e", *pip_install(job)]) if job.packages else None,
        "run": "\n".join(["set -e", *head, start]),
    }


def _at_least(count: int | None) -> str | None:
    return f"{count}+" if count else None
