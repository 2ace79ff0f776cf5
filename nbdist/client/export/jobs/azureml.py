"""Azure Machine Learning: a command job. Pure.

Azure starts the ranks itself, with torchrun's variables.
"""

import shlex
from typing import Any, Final

from nbdist.client.export.jobs.file_text import pip_install, yaml_file
from nbdist.client.export.jobs.job import Job

HELP = "a command job for Azure Machine Learning"
WORDS: tuple[str, ...] = ("--time",)

_SCHEMA: Final = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"


def files(job: Job) -> dict[str, str]:
    """Return the job."""
    file = f"{job.stem}-azureml.yaml"
    heading = [
        f"Runs {job.script} on {job.world_size} ranks. Its folder is sent along.",
        "Fill in what is in capitals; then, in that folder:",
        f"    az ml job create --file {file} --resource-group GROUP --workspace-name WORKSPACE",
    ]
    return {file: yaml_file(heading, _command_job(job))}


def _command_job(job: Job) -> dict[str, Any]:
    command = shlex.join(["python", job.script, *job.arguments])
    return {
        "$schema": _SCHEMA,
        "type": "command",
        "display_name": job.name,
        "code": ".",
        "command": " && ".join([*pip_install(job), command]),
        "environment": {"image": job.image or "REGISTRY.azurecr.io/IMAGE:TAG"},
        # Azure sets all that torchrun does but this, by which nbdist.init() tells nodes apart.
        "environment_variables": {
            "LOCAL_WORLD_SIZE": str(job.ranks_per_node),
            **job.environment,
        },
        "compute": "azureml:COMPUTE",
        "resources": {"instance_count": job.nodes},
        "distribution": {"type": "pytorch", "process_count_per_instance": job.ranks_per_node},
        "limits": {"timeout": job.time_limit_s},
    }
