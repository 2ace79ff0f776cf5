"""Options that several launchers have. Light: the magics load it with themselves."""

from dataclasses import dataclass

from nbdist.shared.errors import UsageError
from nbdist.shared.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsOptions:
    """Of launchers that reach hosts by name: ssh and mpi."""

    hosts: str = option(
        "",
        "with --launcher ssh or mpi: a:2,b:2 for two ranks on each, or a file of hosts",
        "Names are those of `~/.ssh/config`; hosts beyond the `n` ranks are spare.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesOptions:
    """Of launchers that ask for nodes: slurm and kubernetes.

    Raises:
        UsageError: There would be no node, or no rank on it.
    """

    nodes: int | None = option(
        None,
        "slurm: nodes to allocate; kubernetes: pods",
        "Without any option of `slurm`, a notebook that runs in a job takes that job's nodes.",
        metavar="N",
    )
    gpus_per_node: int | None = option(
        None, "slurm, kubernetes: GPUs of each node or pod, and ranks there", metavar="N"
    )
    time: str = option(
        "",
        "slurm, kubernetes: time limit, such as 2:00:00",
        "A number is minutes; `1-12:00:00` has days.",
        metavar="LIMIT",
    )

    def __post_init__(self) -> None:
        """Refuse what no launcher could ask for."""
        for name in ("nodes", "gpus_per_node"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UsageError(f"{name} must be at least 1, not {number}.")
