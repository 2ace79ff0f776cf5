"""The shell script on a host for `srun` and `mpiexec`, which have no login shell there. Pure."""

import os
import shlex
import sys
from collections.abc import Sequence

from nbdist.client.cluster.launchers.hosts.hosts import parent_command

# Variables of the one task that is the parent: a library in a rank would take the rank for it.
TASK_VARIABLES = (
    "(SLURM_(PROCID|LOCALID|NODEID|GTIDS|NTASKS|NPROCS|NNODES|NODELIST|TASK|STEP|CPU_BIND|SRUN"
    "|LAUNCH|DISTRIBUTION)|OMPI_|PRTE_|PMIX_|PMI_|PMI2_|MPI_LOCAL|HYDI_|HYDRA_)[A-Za-z0-9_]*"
)


def task_script(python: str, before: Sequence[str] = ()) -> str:
    """Return a script that drops the task's variables and becomes the parent.

    Args:
        python: Of the host.
        before: Lines to run first.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    unset = f"for v in $(env | grep -Eo '^{TASK_VARIABLES}=' | tr -d =); do unset $v; done"
    words = shlex.join(parent_command(python))
    return "\n".join([*before, unset, f"export PYTHONPATH={shlex.quote(path)}", f"exec {words}"])
