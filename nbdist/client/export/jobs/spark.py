"""Spark: a driver that runs the script on executors, by pyspark's TorchDistributor. Pure."""

from typing import Final

from nbdist.client.export.jobs.driver import driver
from nbdist.client.export.jobs.job import Job

HELP = "a driver for Spark, by pyspark's TorchDistributor"
WORDS: tuple[str, ...] = ()

_DOCSTRING: Final = """
Run {script} on {n} tasks of Spark, all at once. In its folder:

    spark-submit {file}

A local master has as many slots as it is given: spark-submit --master "local[{n}]" {file}
"""
_IMPORTS: Final = """
from pathlib import Path

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession
"""
_MAIN: Final = """
spark = SparkSession.builder.appName({name!r}).getOrCreate()
TorchDistributor(num_processes={n}, local_mode=False, use_gpu={use_gpu}).run(run_script, job)
spark.stop()
"""


def files(job: Job) -> dict[str, str]:
    """Return the driver. Executors have torch, and what the script imports, already."""
    file = f"{job.stem}_spark.py"
    main = _MAIN.format(name=job.name, n=job.world_size, use_gpu=job.device == "cuda")
    docstring = _DOCSTRING.format(script=job.script, n=job.world_size, file=file)
    if job.packages:
        docstring += f"\nExecutors need: {', '.join(job.packages)}.\n"
    return {file: driver(job, docstring=docstring, imports=_IMPORTS, main=main)}
