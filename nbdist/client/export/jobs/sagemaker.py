"""Amazon SageMaker: a training job for its command line, and what each container runs. Pure.

A shell script of its own, since SageMaker takes only 256 characters an argument.
"""

from typing import Any, Final

from nbdist.client.export.jobs.file_text import comment, exports, pip_install, torchrun, yaml_file
from nbdist.client.export.jobs.job import Job

HELP = "a training job for Amazon SageMaker"
WORDS: tuple[str, ...] = ("--time",)

_CODE: Final = "/opt/ml/input/data/code"
_DAY_S: Final = 24 * 60 * 60
_GPU_INSTANCES: Final = {1: "ml.g5.xlarge", 4: "ml.g5.12xlarge"}
_FIND_NODE: Final = """python3 - > /tmp/node <<'EOF'
import json

here = json.load(open("/opt/ml/input/config/resourceconfig.json"))
hosts = sorted(here["hosts"])
print(hosts[0], hosts.index(here["current_host"]))
EOF
read -r head node < /tmp/node"""


def files(job: Job) -> dict[str, str]:
    """Return the request, and the script that each container runs."""
    file, start = f"{job.stem}-sagemaker.yaml", f"{job.stem}-sagemaker.sh"
    heading = [
        f"Runs {job.script} on {job.world_size} ranks.",
        "Fill in what is in capitals, here and below, and choose an instance type; then:",
        f"    aws s3 cp . s3://BUCKET/{job.name}/code --recursive --exclude '*' \\",
        "        " + " ".join(f"--include {name}" for name in (job.script, *job.modules, start)),
        f"    aws sagemaker create-training-job --cli-input-yaml file://{file}",
        "A job's name is free once only: give the next one another.",
    ]
    line = torchrun(job, head='"$head"', node='"$node"', script=f"{_CODE}/{job.script}")
    find = [_FIND_NODE] if job.nodes > 1 else []
    body = ["set -euo pipefail", *exports(job), *pip_install(job), *find, f"exec {line}"]
    comments = comment([f"What each container of {file} runs."])
    return {
        file: yaml_file(heading, _request(job, start)),
        start: "\n".join(["#!/bin/bash", comments, *body, ""]),
    }


def _request(job: Job, start: str) -> dict[str, Any]:
    folder = f"s3://BUCKET/{job.name}"
    return {
        "TrainingJobName": job.name,
        "RoleArn": "arn:aws:iam::ACCOUNT:role/ROLE",
        "AlgorithmSpecification": {
            "TrainingImage": job.image or "ACCOUNT.dkr.ecr.REGION.amazonaws.com/IMAGE:TAG",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash", f"{_CODE}/{start}"],
        },
        "InputDataConfig": [
            {
                "ChannelName": "code",
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3Uri": f"{folder}/code",
                        "S3DataDistributionType": "FullyReplicated",
                    }
                },
            }
        ],
        "OutputDataConfig": {"S3OutputPath": f"{folder}/output"},
        "ResourceConfig": {
            "InstanceType": _instance_type(job.gpus_per_node),
            "InstanceCount": job.nodes,
            "VolumeSizeInGB": 50,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": job.time_limit_s or _DAY_S},
    }


def _instance_type(gpus: int) -> str:
    """Return the smallest type with so many GPUs, that people can do better than."""
    if not gpus:
        return "ml.m5.2xlarge"
    return next((kind for n, kind in _GPU_INSTANCES.items() if n >= gpus), "ml.p4d.24xlarge")
