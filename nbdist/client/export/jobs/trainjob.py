"""Kubeflow Trainer: a TrainJob of the runtime `torch-distributed`. Pure.

The script lies in a ConfigMap, so that no image has to be built for it. Kubeflow sets what torchrun
reads (`PET_NNODES`, `PET_NODE_RANK`, ...).
"""

import shlex
from typing import Any, Final

from nbdist.client.export.jobs.file_text import pip_install, yaml_file
from nbdist.client.export.jobs.job import Job

HELP = "a TrainJob of Kubeflow Trainer 2.2 or newer"
WORDS: tuple[str, ...] = ("--time",)

_FOLDER: Final = "/opt/nbdist"
_RUNTIME: Final = (
    "torch-distributed"  # which Kubeflow Trainer brings; its pods' container is `node`
)
_MANAGER: Final = "nbdist.dev/export"  # of the patch: Kubeflow wants its author's name


def files(job: Job) -> dict[str, str]:
    """Return the TrainJob; the script's ConfigMap is made from the script itself."""
    file = f"{job.stem}-trainjob.yaml"
    heading = [
        f"Runs {job.script} on {job.world_size} ranks:",
        f"    kubectl create configmap {job.name} {_from_files(job)}",
        f"    kubectl create -f {file}",
    ]
    return {file: yaml_file(heading, _train_job(job))}


def _train_job(job: Job) -> dict[str, Any]:
    line = shlex.join(["torchrun", f"{_FOLDER}/{job.script}", *job.arguments])
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": _RUNTIME},
            "activeDeadlineSeconds": job.time_limit_s,
            "trainer": {
                "numNodes": job.nodes,
                "numProcPerNode": job.ranks_per_node,
                "image": job.image or None,
                "command": ["bash", "-c", "\n".join(["set -e", *pip_install(job), f"exec {line}"])],
                "env": [{"name": name, "value": value} for name, value in job.environment.items()],
                "resourcesPerNode": _resources(job),
            },
            "runtimePatches": [_mounted(job)],
        },
    }


def _resources(job: Job) -> dict[str, Any]:
    limits = {
        "nvidia.com/gpu": str(job.gpus_per_node) if job.gpus_per_node else None,
        "memory": f"{job.memory_gib}Gi" if job.memory_gib else None,
    }
    requests = {"cpu": str(job.cores_per_node) if job.cores_per_node else None, **limits}
    return {"requests": requests, "limits": limits}


def _keys(job: Job) -> dict[str, str]:
    """Return the ConfigMap's keys, which know no folders, and the files that they stand for."""
    return {name.replace("/", "--"): name for name in (job.script, *job.modules)}


def _from_files(job: Job) -> str:
    return " ".join(
        f"--from-file={name}" if key == name else f"--from-file={key}={name}"
        for key, name in _keys(job).items()
    )


def _mounted(job: Job) -> dict[str, Any]:
    """Return the patch by which each pod has the script, and the modules beside it."""
    keys = _keys(job)
    items = [{"key": key, "path": path} for key, path in keys.items()]
    config_map = {"name": job.name, "items": items if any("/" in p for p in job.modules) else None}
    pod = {
        "containers": [
            {"name": "node", "volumeMounts": [{"name": "script", "mountPath": _FOLDER}]}
        ],
        "volumes": [{"name": "script", "configMap": config_map}],
    }
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    return {
        "manager": _MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }
