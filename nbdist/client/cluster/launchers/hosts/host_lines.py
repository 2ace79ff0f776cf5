"""The hosts of `--hosts`: as a word each, or in a file; and a launcher for them.

Pure, but for that file and names of this machine.
"""

import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nbdist.client.cluster.launchers.base import LaunchOptions
from nbdist.client.cluster.launchers.hosts.host import Channel
from nbdist.client.cluster.launchers.hosts.hosts import HostsLauncher, parent_command
from nbdist.client.cluster.launchers.shared_options import HostsOptions
from nbdist.client.cluster.network import has_curve, require_trust
from nbdist.shared.errors import UsageError
from nbdist.shared.placement import HERE

_WORD = re.compile(r"^(?P<host>[^\s:=,]+)(:(?P<slots>\d+))?$")
_VARIABLE = re.compile(r"\$\w+")


@dataclass(frozen=True, slots=True)
class HostLine:
    """One host as the person wrote it."""

    host: str
    slots: int
    python: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def launch(
    logs: Path,
    lines: Sequence[HostLine],
    asked: LaunchOptions[HostsOptions],
    channel_to: Callable[[HostLine], Channel],
) -> HostsLauncher:
    """Return a launcher for these hosts, with channels that are being opened.

    Args:
        logs: Folder for logs.
        lines: The hosts; one may be this machine.
        asked: What the person has said.
        channel_to: Makes the channel to another host.

    Raises:
        StartError: The network is not trusted.
    """
    here = names_of_this_machine()
    if any(line.host not in here for line in lines):
        require_trust(
            "Ranks of several hosts meet over the network",
            "between hosts",
            trust_network=asked.trust_network,
            has_curve=has_curve(),
        )
    channels = [_channel_here(line) if line.host in here else channel_to(line) for line in lines]
    # Rank 0 is the notebook's neighbour where there is one.
    channels.sort(key=lambda channel: channel.host != HERE)
    return HostsLauncher(logs, channels)


def _channel_here(line: HostLine) -> Channel:
    command = parent_command(line.python or sys.executable)
    return Channel(HERE, line.slots, command, line.environment)


def read_hosts(text: str, launcher: str) -> list[HostLine]:
    """Return the hosts of `a:2,b:2`, or of a file with one a line.

    A line of the file is a host, `slots=2`, `python=/path`, and `NAME=VALUE` for what ranks there
    have in their environment; `#` begins a comment.

    Args:
        text: As typed. Variables of the environment count, such as `$PBS_NODEFILE`.
        launcher: Its name, for one who has typed nothing.

    Raises:
        UsageError: It makes no sense, or names a host twice.
    """
    if not text:
        raise UsageError(
            f"--launcher {launcher} needs hosts.",
            do=f"%dist start --launcher {launcher} --hosts a:2,b:2, or name a file of hosts",
        )
    text = os.path.expandvars(text)
    if unset := _VARIABLE.search(text):
        raise UsageError(
            f"--hosts names {unset[0]}, which is not set in this notebook's environment.",
            do="start the notebook within a job, or name the hosts: --hosts a:2,b:2",
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
