"""How to reach the nodes of a batch system that only ipyparallel has a launcher for.

ipyparallel's launchers submit jobs of engines. Such a job has no channel back to the notebook but
the sockets of its engines: the node of a rank would be unknown before it has joined, and its end
would be too; nor could one be started again in its place. nbdist so does not use them. Within a
job of any batch system its own launchers do: `mpiexec` or `ssh` reach the job's nodes.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from nbdist.shared.errors import UsageError

IPYPARALLELS: Final = "ipyparallel.engine_launchers"
_WITHIN: Final = (
    "start the notebook in a job of several nodes ({job}), and there %dist start {start}"
)
_MPI: Final = "--launcher mpi --trust-network --hosts {hosts}"
_SSH: Final = "--launcher ssh --trust-network --hosts a:2,b:2"
# By ipyparallel's names, what to do instead.
_INSTEAD: Final = {
    "pbs": _WITHIN.format(job="qsub -I", start=_MPI.format(hosts="$PBS_NODEFILE")),
    "lsf": _WITHIN.format(job="bsub -Is", start=_MPI.format(hosts="$LSB_DJOB_HOSTFILE")),
    "sge": _WITHIN.format(job="qrsh -pe PE SLOTS", start=_MPI.format(hosts="$PE_HOSTFILE")),
    "batch": "use --launcher slurm; in a job of another batch system " + _MPI.format(hosts="FILE"),
    "htcondor": f"use {_SSH}, with hosts of the pool that let you in",
    "sshproxy": f"use {_SSH}; a ProxyJump in ~/.ssh/config leads through another host",
}


def refusal(name: str) -> UsageError | None:
    """Return why a launcher of ipyparallel's cannot be used, and what can; None for other names."""
    found = [entry for entry in entry_points(group=IPYPARALLELS) if entry.name == name]
    return _refuse(found[0]) if found else None


def _refuse(entry: EntryPoint) -> UsageError:
    of_another = f"use {_SSH}; or offer it to nbdist as an entry point of nbdist.launchers"
    return UsageError(
        f"{entry.name!r} is a launcher of ipyparallel's ({entry.attr}), which nbdist cannot use.",
        why="it starts engines without a channel to the notebook: where each rank is, and that it "
        "has ended, would stay unknown.",
        do=f"{_INSTEAD.get(entry.name, of_another)}.",
    )
