"""MPI on test hosts: how to start one command on each of some hosts, by their own ssh.

Two kinds, as users have them: Open MPI from Debian, and MPICH from a wheel in this environment. The
wheel's `mpiexec` is first in a host's PATH, so that both are called by the names only they have.
"""

import subprocess
from collections.abc import Sequence
from typing import Literal

from tests.hosts.host import Host

Kind = Literal["openmpi", "mpich"]
KINDS: tuple[Kind, ...] = ("openmpi", "mpich")

# Where a rank finds its number, and its number among those on its host.
RANK = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK"}
LOCAL_RANK = {"openmpi": "OMPI_COMM_WORLD_LOCAL_RANK", "mpich": "MPI_LOCALRANKID"}


def mpiexec(kind: Kind, hosts: Sequence[Host], ranks_per_host: int = 1) -> list[str]:
    """Return the words before a command that start it on these hosts, from the first."""
    names = [f"{host.name}:{ranks_per_host}" for host in hosts]
    count = str(len(hosts) * ranks_per_host)
    if kind == "openmpi":
        # Root is the only user here; loopback is no way to another host.
        network = ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
        start = ["mpiexec.openmpi", "--allow-run-as-root", *network, "--host", ",".join(names)]
        return [*start, "-n", count]
    return [
        "mpiexec.hydra",
        "-launcher",
        "ssh",
        "-iface",
        "eth0",
        "-hosts",
        ",".join(names),
        "-n",
        count,
    ]


def run(
    kind: Kind, hosts: Sequence[Host], command: Sequence[str], ranks_per_host: int = 1
) -> "subprocess.CompletedProcess[str]":
    """Run `command` as `ranks_per_host` ranks on each of these hosts, and return their output."""
    return hosts[0].run([*mpiexec(kind, hosts, ranks_per_host), *command])
