"""Hosts that an MPI reaches: one `mpiexec` a host, which starts its parent there.

Each `mpiexec` has one process, so that its input and output are the parent's: MPICH gives no input
to others than the first, and lines of several processes would be mixed. Ranks are no MPI processes:
their places come from `--hosts`, and mpi4py sees a world of one in each.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Final, Literal

from nbdist.client.cluster.launchers import ssh
from nbdist.client.cluster.launchers.base import MPI, LaunchOptions
from nbdist.client.cluster.launchers.hosts import host_lines
from nbdist.client.cluster.launchers.hosts.host import Channel
from nbdist.client.cluster.launchers.hosts.host_lines import HostLine
from nbdist.client.cluster.launchers.hosts.hosts import HostsLauncher
from nbdist.client.cluster.launchers.hosts.task_script import task_script
from nbdist.client.cluster.launchers.shared_options import HostsOptions as Options
from nbdist.shared.errors import StartError

Flavour = Literal["Open MPI", "Hydra"]
_ASK_S: Final = 20.0
# Options of ssh where MPI uses it: never to ask, and not to wait long. Open MPI 4, 5; Hydra.
_SSH: Final = "-o BatchMode=yes -o ConnectTimeout=8"
_SSH_VARIABLES: Final = {
    "OMPI_MCA_plm_rsh_args": _SSH,
    "PRTE_MCA_plm_ssh_args": _SSH,
    "HYDRA_LAUNCHER_EXTRA_ARGS": _SSH,
}
_MEANINGS = (
    (
        "run as root",
        "Open MPI refuses to run as root",
        "set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 in os.environ",
    ),
    (
        "not enough slots",
        "the resource manager has not given you a slot there",
        "name hosts of your allocation",
    ),
    ("not in the current allocation", "it is not in your allocation", "name hosts of that"),
    ("orted: command not found", "it has no Open MPI at the same path", "install it there, too"),
    ("prted: command not found", "it has no Open MPI at the same path", "install it there, too"),
    ("hydra_pmi_proxy: ", "it has no MPICH at the same path", "install it there, too"),
)


def make_launcher(logs: Path, asked: LaunchOptions[Options]) -> HostsLauncher:
    """Return a launcher for the hosts of `--hosts`, with channels that are being opened.

    Raises:
        StartError: There is no `mpiexec`, or the network is not trusted.
        UsageError: `--hosts` is missing or makes no sense.
    """
    lines, flavour = read_machines(asked.own.hosts), find_flavour()
    return host_lines.launch(logs, lines, asked, partial(_channel, flavour))


def read_machines(text: str) -> list[HostLine]:
    """Return the hosts of `a:2,b:2`, or of a machine file.

    Such a file may name a host once for each slot, as PBS and LSF do, or have lines such as Grid
    Engine's, `node 4 all.q@node UNDEFINED`; see `host_lines.read_hosts`.

    Raises:
        UsageError: There is none, or it makes no sense.
    """
    file = Path(os.path.expandvars(text)).expanduser()
    if text and file.is_file():
        lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
        slots = Counter(filter(None, lines))
        if slots.total() > len(slots) and not any(set(" =:") & set(line) for line in slots):
            return [HostLine(host, count) for host, count in slots.items()]
        words = [line.split() for line in slots]
        if words and all(len(line) == 4 and line[1].isdigit() for line in words):
            return [HostLine(line[0], int(line[1])) for line in words]
    return host_lines.read_hosts(text, MPI)


def find_flavour() -> Flavour:
    """Return the MPI whose `mpiexec` is first in the PATH.

    Raises:
        StartError: There is none, or it is of no known MPI.
    """
    program = shutil.which("mpiexec")
    if program is None:
        raise StartError(
            "mpiexec is not on this machine.",
            do="module load an MPI before the notebook begins, or use --launcher ssh.",
        )
    done = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=_ASK_S, check=False
    )
    flavour = flavour_of(done.stdout + done.stderr)
    if flavour is None:
        first = (done.stdout + done.stderr).strip().splitlines()[:1] or ["it says nothing"]
        raise StartError(
            f"{program} is neither Open MPI's nor MPICH's.",
            why=first[0],
            do="put one of these first in PATH, or use --launcher ssh.",
        )
    return flavour


def flavour_of(version: str) -> Flavour | None:
    """Return whose `mpiexec` this version text is from. Intel MPI and MVAPICH have Hydra, too."""
    if any(sign in version for sign in ("Open MPI", "OpenRTE", "PRRTE")):
        return "Open MPI"
    if any(sign in version for sign in ("HYDRA", "Intel(R) MPI")):
        return "Hydra"
    return None


def _channel(flavour: Flavour, line: HostLine) -> Channel:
    python = line.python or sys.executable
    return Channel(
        line.host,
        line.slots,
        mpiexec(flavour, line.host, task_script(python)),
        line.environment,
        lambda status, said: explain(line.host, status, said),
    )


def mpiexec(flavour: Flavour, host: str, script: str) -> list[str]:
    """Return the command that runs a shell script on a host, with all of its cores."""
    # What a person has set for ssh holds.
    ours = [f"{k}={v}" for k, v in _SSH_VARIABLES.items() if k not in os.environ]
    if flavour == "Open MPI":
        where = ["--host", f"{host}:1", "-n", "1", "--bind-to", "none"]
    else:
        where = ["-hosts", host, "-n", "1"]
    return ["env", *ours, "mpiexec", *where, "sh", "-c", script]


def explain(host: str, status: int, said: str) -> tuple[str, str]:
    """Return why a host's `mpiexec` ended, in words, and what to do."""
    for sign, meaning, do in _MEANINGS:
        if sign in said:
            return meaning, do
    lines = [line for line in said.splitlines() if line.strip("-* ")]
    return ssh.explain(host, status, "\n".join(lines) or f"mpiexec ended with exit code {status}")
