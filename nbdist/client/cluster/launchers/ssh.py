"""Hosts over ssh: one `ssh` a host, which starts its parent. Pure.

`~/.ssh/config` holds for it: names, users, ports, keys, jump hosts. It never asks: a host that
would want a password is refused.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from nbdist.client.cluster.launchers.base import SSH, LaunchOptions
from nbdist.client.cluster.launchers.hosts import host_lines
from nbdist.client.cluster.launchers.hosts.host import Channel
from nbdist.client.cluster.launchers.hosts.host_lines import HostLine
from nbdist.client.cluster.launchers.hosts.hosts import HostsLauncher, parent_command
from nbdist.client.cluster.launchers.shared_options import HostsOptions as Options
from nbdist.shared.errors import install

_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "EscapeChar=none"),
    # A host that is gone is noticed without a kernel that computes.
    *("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=10"),
    # A shared connection would end with whichever ssh had opened it.
    *("-o", "ControlMaster=no", "-o", "ControlPath=none"),
)
_KILLED = 255  # the status of ssh itself, also where a signal has ended the command
# What ssh and a shell say, and what it means. `{host}` is the host.
_MEANINGS = (
    ("Permission denied", "it refuses your key", "ssh-copy-id {host}, or ssh-add your key"),
    (
        "Host key verification failed",
        "its key is not known here, or has changed",
        "ssh {host} once by hand, and compare its key",
    ),
    ("Connection refused", "nothing listens for ssh there", "start sshd there, or check the port"),
    ("Could not resolve hostname", "no such name", "check the name, or ~/.ssh/config"),
    ("timed out", "it does not answer", "check that it is up, and that ssh {host} works"),
    ("No route to host", "it does not answer", "check that it is up, and that ssh {host} works"),
    ("Network is unreachable", "no network leads to it", "check that ssh {host} works"),
    (
        "No module named nbdist",
        "its Python has no nbdist",
        f"{install()} there, or name another Python for it in a file of hosts",
    ),
    (
        "No module named",
        "its Python lacks a module",
        f"install nbdist with all it needs there: {install()}",
    ),
    (
        "No such file or directory",
        "it has no such Python",
        "name its Python in a file of hosts: python=/path/to/python",
    ),
    (
        "not found",
        "it has no such Python",
        "name its Python in a file of hosts: python=/path/to/python",
    ),
)


def make_launcher(logs: Path, asked: LaunchOptions[Options]) -> HostsLauncher:
    """Return a launcher for the hosts of `--hosts`, with channels that are being opened.

    Raises:
        StartError: The network is not trusted.
        UsageError: `--hosts` is missing or makes no sense.
    """
    return host_lines.launch(logs, host_lines.read_hosts(asked.own.hosts, SSH), asked, _channel)


def _channel(line: HostLine) -> Channel:
    _, *words = parent_command("python")
    command = command_on(line.host, words, line.python)
    return Channel(
        line.host,
        line.slots,
        command,
        line.environment,
        lambda status, said: explain(line.host, status, said),
    )


def command_on(host: str, words: Sequence[str], python: str = "") -> list[str]:
    """Return what runs Python with these words on a host, whichever shell is the login's there.

    Args:
        host: A name that ssh knows.
        words: Python's arguments.
        python: Which one; by default the one of here, where the host has it, else `python3`.
    """
    found = shlex.quote(python or sys.executable)
    fallback = "" if python else f"command -v {found} >/dev/null 2>&1 || p=python3; "
    path = os.pathsep.join(entry for entry in sys.path if entry)
    script = f"p={found}; {fallback}exec env PYTHONPATH={shlex.quote(path)} $p {shlex.join(words)}"
    return ["ssh", *_OPTIONS, "--", host, f"exec sh -c {shlex.quote(script)}"]


def explain(host: str, status: int, said: str) -> tuple[str, str]:
    """Return why a host's command ended, in words, and what to do."""
    for sign, meaning, do in _MEANINGS:
        if sign in said.replace("'", ""):
            return meaning, do.format(host=host)
    if status < 0:
        return (
            f"its ssh was ended by signal {-status}",
            "%dist restart or %dist scale connects again",
        )
    if status == _KILLED and not said.strip():
        return "its parent process was killed, or its connection ended", f"ssh {host} shows more"
    last = said.strip().splitlines()[-1:] or [f"ssh ended with exit code {status}"]
    return last[0], f"ssh {host} shows more"
