"""Google Vertex AI: a custom job for gcloud. Pure."""

from typing import Any, Final

from nbdist.client.export.jobs.file_text import pip_install, torchrun, yaml_file
from nbdist.client.export.jobs.job import Job

HELP = "a custom job for Google Vertex AI"
WORDS: tuple[str, ...] = ("--time",)

_L4_MACHINES: Final = {1: "g2-standard-12", 2: "g2-standard-24", 4: "g2-standard-48"}
_FIND_NODE: Final = """python3 - > /tmp/node <<'EOF'
import json
import os

here = json.loads(os.environ["CLUSTER_SPEC"])
pools = sorted(here["cluster"])
nodes = [host for pool in pools for host in here["cluster"][pool]]
task = here["task"]
before = pools[: pools.index(task["type"])]
number = sum(len(here["cluster"][pool]) for pool in before) + task["index"]
print(nodes[0].partition(":")[0], number)
EOF
read -r head node < /tmp/node"""


def files(job: Job) -> dict[str, str]:
    """Return the job."""
    file = f"{job.stem}-vertex.yaml"
    heading = [
        f"Runs {job.script} on {job.world_size} ranks.",
        "Fill in what is in capitals, here and below, and choose a machine type; then:",
        *_copies(job),
        "    gcloud ai custom-jobs create --region=REGION \\",
        f"        --display-name={job.name} --config={file}",
    ]
    return {file: yaml_file(heading, _custom_job(job))}


def _copies(job: Job) -> list[str]:
    """Return the commands that send the script and the modules beside it, one a folder."""
    folders: dict[str, list[str]] = {}
    for name in (job.script, *job.modules):
        folder = name.rpartition("/")[0]
        folders.setdefault(f"{folder}/" if folder else "", []).append(name)
    return [
        f"    gcloud storage cp {' '.join(names)} gs://BUCKET/{job.name}/{folder}"
        for folder, names in folders.items()
    ]


def _custom_job(job: Job) -> dict[str, Any]:
    # The first pool is one machine by Vertex's own rule; it has rank 0.
    pools = [_pool(job, 1), *([_pool(job, job.nodes - 1)] if job.nodes > 1 else [])]
    limit = f"{job.time_limit_s}s" if job.time_limit_s else None
    return {"workerPoolSpecs": pools, "scheduling": {"timeout": limit}}


def _pool(job: Job, machines: int) -> dict[str, Any]:
    script = f"/gcs/BUCKET/{job.name}/{job.script}"  # Vertex mounts buckets there
    line = torchrun(job, head='"$head"', node='"$node"', script=script)
    find = [_FIND_NODE] if job.nodes > 1 else []
    body = ["set -euo pipefail", *pip_install(job), *find, f"exec {line}"]
    return {
        "machineSpec": _machine(job.gpus_per_node),
        "replicaCount": machines,
        "containerSpec": {
            "imageUri": job.image or "REGION-docker.pkg.dev/PROJECT/REPOSITORY/IMAGE:TAG",
            "command": ["bash", "-c"],
            "args": ["\n".join(body)],
            "env": [{"name": name, "value": value} for name, value in job.environment.items()],
        },
    }


def _machine(gpus: int) -> dict[str, Any]:
    """Return a machine with so many GPUs, that people can do better than."""
    if not gpus:
        return {"machineType": "n2-standard-8"}
    kind = _L4_MACHINES.get(gpus, "g2-standard-96")
    return {"machineType": kind, "acceleratorType": "NVIDIA_L4", "acceleratorCount": gpus}
