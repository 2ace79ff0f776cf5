"""Hosts over ssh: one `ssh` a host, which starts its parent. Pure, but for names of this machine.

`~/.ssh/config` holds for it: names, users, ports, keys, jump hosts. It never asks: a host that
would want a password is refused.
"""

import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nbdist.client.cluster.launchers.base import LaunchOptions
from nbdist.client.cluster.launchers.host import Channel
from nbdist.client.cluster.launchers.hosts import HostsLauncher, parent_command
from nbdist.client.cluster.network import has_curve, require_trust
from nbdist.errors import UsageError
from nbdist.placement import HERE

_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "EscapeChar=none"),
    # A host that is gone is noticed without a kernel that computes.
    *("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=10"),
    # A shared connection would end with whichever ssh had opened it.
    *("-o", "ControlMaster=no", "-o", "ControlPath=none"),
)
_WORD = re.compile(r"^(?P<host>[^\s:=,]+)(:(?P<slots>\d+))?$")
_KILLED = 255  # ssh's own status, also where a signal has ended the command
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
        "pip install nbdist there, or name another Python for it in a file of hosts",
    ),
    (
        "No module named",
        "its Python lacks a module",
        "install nbdist with all it needs there (pip install nbdist)",
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


@dataclass(frozen=True, slots=True)
class HostLine:
    """One host as the person wrote it."""

    host: str
    slots: int
    python: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def make_launcher(logs: Path, asked: LaunchOptions) -> HostsLauncher:
    """Return a launcher for the hosts of `--hosts`, with channels that are being opened.

    Raises:
        StartError: The network is not trusted.
        UsageError: `--hosts` is missing or makes no sense.
    """
    lines = read_hosts(asked.hosts)
    here = names_of_this_machine()
    if any(line.host not in here for line in lines):
        require_trust(
            "Ranks of several hosts meet over the network",
            "between hosts",
            trust_network=asked.trust_network,
            has_curve=has_curve(),
        )
    channels = [_channel(line, is_here=line.host in here) for line in lines]
    # Rank 0 is the notebook's neighbour where there is one.
    channels.sort(key=lambda channel: channel.host != HERE)
    return HostsLauncher(logs, channels)


def read_hosts(text: str) -> list[HostLine]:
    """Return the hosts of `a:2,b:2`, or of a file with one a line.

    A line of the file is a host, `slots=2`, `python=/path`, and `NAME=VALUE` for what ranks there
    have in their environment; `#` begins a comment.

    Raises:
        UsageError: It makes no sense, or names a host twice.
    """
    if not text:
        raise UsageError(
            "--launcher ssh needs hosts.", do="%dist start --launcher ssh --hosts a:2,b:2"
        )
    file = Path(text).expanduser()
    if file.is_file():
        text = file.read_text(errors="replace")
        found = [_line(line) for line in text.splitlines() if _uncommented(line)]
    else:
        found = [_word(word) for word in text.split(",")]
    names = [line.host for line in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--hosts names {twice[0]} twice; {twice[0]}:2 means two ranks there.")
    if not found:
        raise UsageError(f"{file} names no hosts.")
    return found


def _uncommented(line: str) -> str:
    return line.partition("#")[0].strip()


def _word(word: str) -> HostLine:
    match = _WORD.match(word.strip())
    if match is None or match["slots"] == "0" or word.startswith("-"):
        raise UsageError(
            f"--hosts is HOST:RANKS,HOST:RANKS or a file of hosts, not {word.strip()!r}."
        )
    return HostLine(match["host"], int(match["slots"] or 1))


def _line(line: str) -> HostLine:
    try:
        name, *rest = shlex.split(_uncommented(line))
    except ValueError as error:  # a quote that is not closed
        raise UsageError(f"A line of hosts makes no sense: {line!r} ({error}).") from error
    values = dict(word.partition("=")[::2] for word in rest)
    wrong = [word for word in rest if "=" not in word]
    slots = values.pop("slots", "")
    begin = _word(f"{name}:{slots}" if slots else name)
    if wrong:
        raise UsageError(f"A line of hosts is HOST slots=N python=PATH NAME=VALUE, not {line!r}.")
    return HostLine(begin.host, begin.slots, values.pop("python", ""), values)


def names_of_this_machine() -> set[str]:
    """Return the names by which this machine is no other host."""
    return {HERE, "127.0.0.1", socket.gethostname()}


def _channel(line: HostLine, *, is_here: bool) -> Channel:
    if is_here:
        python = line.python or sys.executable
        return Channel(HERE, line.slots, parent_command(python), line.environment)
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
            "%dist restart or %dist scale opens it anew",
        )
    if status == _KILLED and not said.strip():
        return "its parent process was killed, or its connection ended", f"ssh {host} shows more"
    last = said.strip().splitlines()[-1:] or [f"ssh ended with exit code {status}"]
    return last[0], f"ssh {host} shows more"
