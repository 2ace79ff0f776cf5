"""What the test hosts need of this machine."""

import os
import shutil

# The commands, and the Debian package that has each.
_COMMANDS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "ssh": "openssh-client",
    "/usr/sbin/sshd": "openssh-server",
    "faketime": "faketime",
}
_SLURM = {
    "/usr/sbin/munged": "munge",
    "/usr/sbin/slurmctld": "slurmctld",
    "/usr/sbin/slurmd": "slurmd",
    "srun": "slurm-client",
}
_MPI = {"mpiexec.openmpi": "openmpi-bin"}


def missing() -> str:
    """Return why this machine can have no test hosts, "" if it can."""
    if os.geteuid() != 0:
        return "test hosts need root, for their namespaces"
    return _missing(_COMMANDS)


def missing_for_slurm() -> str:
    """Return why there can be no Slurm, "" if there can."""
    return _missing(_SLURM)


def missing_for_mpi() -> str:
    """Return why there can be no MPI of Debian's, "" if there can."""
    return _missing(_MPI)


def missing_packages() -> list[str]:
    """Return the Debian packages that all of this needs, and that are not installed."""
    return sorted(_packages({**_COMMANDS, **_SLURM, **_MPI}))


def is_required() -> bool:
    """Return whether a machine without test hosts is a failure, not a reason to skip."""
    return os.environ.get("NBDIST_REQUIRE_HOSTS") == "1"


def _missing(commands: dict[str, str]) -> str:
    packages = sorted(_packages(commands))
    return f"missing here (Debian: apt install {' '.join(packages)})" if packages else ""


def _packages(commands: dict[str, str]) -> set[str]:
    return {package for command, package in commands.items() if not shutil.which(command)}
