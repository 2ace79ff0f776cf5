"""Read job files by the tools they are for: `python validate.py FORMAT FILE...`, in .venv-jobs.

Prints a line of JSON for each file, of what the tool has understood.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


def trainjob(file: Path) -> dict[str, Any]:
    """Kubeflow Trainer's own model, which must give back all that the file says."""
    models = importlib.import_module("kubeflow_trainer_api.models")
    document = yaml.safe_load(file.read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict(document).to_dict()
    assert read == document, f"the model knows another file: {read}"
    trainer = read["spec"]["trainer"]
    return {"nodes": trainer["numNodes"], "ranks": trainer["numProcPerNode"]}


def skypilot(file: Path) -> dict[str, Any]:
    """SkyPilot's own loader."""
    task = importlib.import_module("sky").Task.from_yaml(str(file))
    gpus = [sum((one.accelerators or {}).values()) for one in task.resources]
    cpus = {one.cpus for one in task.resources}
    return {"nodes": task.num_nodes, "gpus": gpus[0], "cpus": sorted(cpus), "name": task.name}


def azureml(file: Path) -> dict[str, Any]:
    """The loader of Azure ML's SDK, and its own validation."""
    job = importlib.import_module("azure.ai.ml").load_job(str(file))
    assert job._validate().passed
    return {
        "nodes": job.resources.instance_count,
        "ranks": job.distribution.process_count_per_instance,
        "limit": job.limits and job.limits.timeout,
    }


def vertex(file: Path) -> dict[str, Any]:
    """The message that Vertex AI takes, which refuses fields that it does not know."""
    types = importlib.import_module("google.cloud.aiplatform_v1.types")
    json_format = importlib.import_module("google.protobuf.json_format")
    spec = types.CustomJobSpec()
    json_format.ParseDict(yaml.safe_load(file.read_text()), types.CustomJobSpec.pb(spec))
    pools = spec.worker_pool_specs
    return {
        "nodes": sum(pool.replica_count for pool in pools),
        "gpus": pools[0].machine_spec.accelerator_count,
    }


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    reader.__name__: reader for reader in (trainjob, skypilot, azureml, vertex)
}

if __name__ == "__main__":
    for name in sys.argv[2:]:
        with contextlib.redirect_stdout(sys.stderr):  # the tools' own remarks
            understood = READERS[sys.argv[1]](Path(name))
        print(json.dumps(understood))
