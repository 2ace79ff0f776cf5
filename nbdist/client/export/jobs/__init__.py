"""Job files around an exported script: one module for each scheduler or cloud. Pure."""

from collections.abc import Mapping
from types import ModuleType
from typing import Final

from nbdist.client.export.jobs import (
    azureml,
    ray,
    sagemaker,
    sbatch,
    skypilot,
    spark,
    trainjob,
    vertex,
)
from nbdist.client.export.jobs.job import Job
from nbdist.shared.errors import UsageError

_MODULES: Final[Mapping[str, ModuleType]] = {
    "sbatch": sbatch,
    "trainjob": trainjob,
    "skypilot": skypilot,
    "ray": ray,
    "spark": spark,
    "sagemaker": sagemaker,
    "vertex": vertex,
    "azureml": azureml,
}

FORMATS: Final[Mapping[str, str]] = {name: module.HELP for name, module in _MODULES.items()}
"""What each format is, by its name."""
WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    name: module.WORDS for name, module in _MODULES.items()
}
"""Options of `%dist export` that not all formats have a place for, by the format that has."""


def files(format: str, job: Job) -> dict[str, str]:
    """Return the files of a job, by their names; they lie beside the script.

    Raises:
        UsageError: There is no such format.
    """
    if format not in _MODULES:
        raise UsageError(f"There is no format {format!r} of a job; use {', '.join(_MODULES)}.")
    made: dict[str, str] = _MODULES[format].files(job)
    return made


__all__ = ["FORMATS", "WORDS", "Job", "files"]
