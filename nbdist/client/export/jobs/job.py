"""A job: how an exported script is to run outside of a notebook. Pure.

The formats beside this module write it down for one scheduler or cloud each.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final, Literal

from nbdist.client.cluster.launchers.slurm_words import seconds_of
from nbdist.shared.errors import UsageError
from nbdist.shared.options import HASH_SEED

_SCRIPT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.py")  # as keys of a ConfigMap may be
_MODULE: Final = re.compile(r"(?:(?!\.\.?/)[A-Za-z0-9_.-]+/)*(?!\.\.?$)[A-Za-z0-9_.-]+")
_PARTITION: Final = re.compile(r"[^\s\"'\\#]*")  # sbatch ends an option at the first space
_NAME: Final = re.compile(r"[^a-z0-9]+")
_LONGEST_NAME: Final = 40  # Kubernetes takes 63, and its controllers append to it


@dataclass(frozen=True, slots=True)
class Job:
    """What a job file says.

    Attributes:
        script: Name of the script, such as `train.py`; it lies beside the job's files.
        ranks_per_node: Processes on each node; with `cuda` also its GPUs.
        nodes: Machines, containers or pods.
        device: What ranks compute on.
        name: Of the job; by default the script's. Others than `a-z`, `0-9` and `-` are replaced.
        modules: Files that the script needs beside it, also in folders below.
        arguments: Words for the script.
        packages: What pip installs first, where the job's environment is built from scratch.
        environment: Variables of each rank; also PYTHONHASHSEED, as the notebook's ranks have it,
            from which the order of a set of texts follows.
        time_limit: As Slurm reads it: `30` (minutes), `2:00:00`, `1-12` (days and hours).
        image: Of the container, where there is one.
        cores_per_rank: CPU cores; None leaves it to the scheduler.
        memory_gib: Memory of a node in GiB; None leaves it to the scheduler.
        partition: Slurm's.
        sbatch: More options of Slurm's, such as `--mem=64G`.
        before: Lines for the shell of a Slurm job, such as `module load cuda`.
    """

    script: str
    ranks_per_node: int
    nodes: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    name: str = ""
    modules: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    time_limit: str = ""
    image: str = ""
    cores_per_rank: int | None = None
    memory_gib: int | None = None
    partition: str = ""
    sbatch: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no scheduler could run.

        Raises:
            UsageError: There is such a value; the text names it.
        """
        if not _SCRIPT.fullmatch(self.script):
            raise UsageError(
                f"A job runs a script that lies beside its files, and {self.script!r} is no name "
                "that all of its tools take.",
                do="use a name of letters, digits, '_', '-' and '.', such as train.py",
            )
        for module in self.modules:
            if not _MODULE.fullmatch(module):
                raise UsageError(
                    f"The script needs {module}, which does not lie beside it, or has a name that "
                    "not all tools take.",
                    do="move it to the script's folder, and import it from there",
                )
        if not _PARTITION.fullmatch(self.partition):
            raise UsageError(
                f"{self.partition!r} is no partition of Slurm's.",
                do="sinfo -s lists the partitions; several are written a,b",
            )
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"A job's device is cpu or cuda, not {self.device!r}.")
        for what, count in (
            ("ranks a node", self.ranks_per_node),
            ("nodes", self.nodes),
            ("cores a rank", self.cores_per_rank),
            ("GiB of memory", self.memory_gib),
        ):
            if count is not None and count < 1:
                raise UsageError(f"A job needs at least one of its {what}, not {count}.")
        if self.time_limit and not self.time_limit_s:
            raise UsageError(
                f"{self.time_limit!r} is no time limit.",
                do="write it as Slurm does: 30 (minutes), 2:00:00 or 1-12 (days and hours)",
            )
        object.__setattr__(self, "name", _slug(self.name or self.stem))
        environment = {"PYTHONHASHSEED": HASH_SEED, **self.environment}
        object.__setattr__(self, "environment", environment)

    @property
    def stem(self) -> str:
        """The script's name without its ending: the job's files begin with it."""
        return PurePath(self.script).stem

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return self.ranks_per_node * self.nodes

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node."""
        return self.ranks_per_node if self.device == "cuda" else 0

    @property
    def cores_per_node(self) -> int | None:
        """CPU cores of each node; None leaves it to the scheduler."""
        return self.cores_per_rank * self.ranks_per_node if self.cores_per_rank else None

    @property
    def time_limit_s(self) -> int | None:
        """The time limit in seconds; None where there is none, or what is written is none."""
        return seconds_of(self.time_limit)


def _slug(name: str) -> str:
    """Return a name that Kubernetes and all others take: letters, digits, `-`; a letter first."""
    words = _NAME.sub("-", name.lower()).strip("-") or "job"
    return (words if words[0].isalpha() else f"job-{words}")[:_LONGEST_NAME].strip("-")
