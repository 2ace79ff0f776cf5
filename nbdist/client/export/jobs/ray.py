"""Ray: a driver that runs the script on the workers of a TorchTrainer. Pure.

Ray makes a process group before the script begins, which the driver replaces by the script's own.
"""

from typing import Any, Final

from nbdist.client.export.jobs.driver import driver
from nbdist.client.export.jobs.job import Job

HELP = "a driver for Ray Train"
WORDS: tuple[str, ...] = ()

_DOCSTRING: Final = """
Run {script} on {n} workers of Ray. In its folder:

    python {file}                                        on the cluster that Ray finds, or here
    ray job submit --working-dir . -- python {file}      on a cluster
"""
_IMPORTS: Final = """
import os
from pathlib import Path

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
"""
_MAIN: Final = """
# Relative paths of the script are those of the folder that it was submitted from.
os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
ray.init(runtime_env={runtime_env!r})
TorchTrainer(
    run_script,
    train_loop_config=job,
    scaling_config=ScalingConfig(
        num_workers={n},
        use_gpu={use_gpu},
        resources_per_worker={resources!r},
    ),
    torch_config=TorchConfig(backend={backend!r}),
).fit()
"""


def files(job: Job) -> dict[str, str]:
    """Return the driver."""
    file = f"{job.stem}_ray.py"
    resources = {"CPU": job.cores_per_rank or 1}
    # Python has read them before a worker runs the first line.
    runtime_env: dict[str, Any] = {"env_vars": dict(job.environment)}
    if job.packages:
        runtime_env["pip"] = list(job.packages)
    main = _MAIN.format(
        n=job.world_size,
        use_gpu=job.device == "cuda",
        resources=resources | ({"GPU": 1} if job.device == "cuda" else {}),
        backend="cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo",
        runtime_env=runtime_env,
    )
    docstring = _DOCSTRING.format(script=job.script, n=job.world_size, file=file)
    return {file: driver(job, docstring=docstring, imports=_IMPORTS, main=main)}
