"""Launchers of clusters that outlive the kernel: always behind a keeper, also on one machine."""

import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nbdist.client.cluster.launchers.hosts.host import Channel
from nbdist.client.cluster.launchers.hosts.hosts import HostsLauncher, parent_command
from nbdist.client.cluster.launchers.hosts.keeper_link import AttachedKeeperLink
from nbdist.client.cluster.open_files import allow_open_files
from nbdist.shared.placement import HERE

_ANY_RANKS = 1 << 20


class OneHostLauncher(HostsLauncher):
    """The notebook's machine alone, for any number of ranks, as `LocalLauncher` has it."""

    def ready(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Wait for the parent's import of torch; see `Launcher.ready`."""
        of_hosts = super().ready(say)
        return {name: of_hosts[name] for name in ("gpus", "no_gpu", "forks", "why")}


def local_launcher(logs: Path, _asked: object) -> OneHostLauncher:
    """Return a launcher of ranks on this machine that can be detached."""
    allow_open_files()
    return OneHostLauncher(logs, [Channel(HERE, _ANY_RANKS, parent_command(sys.executable))])


def attached_launcher(
    memory: Mapping[str, Any], logs: Path, connection: socket.socket
) -> HostsLauncher:
    """Return a launcher for the processes that a keeper holds; call its `adopt` next.

    Args:
        memory: As `HostsLauncher.memory` returned it in another kernel.
        logs: Folder of the cluster's logs.
        connection: To the keeper.
    """
    is_local = any(host["slots"] == _ANY_RANKS for host in memory["hosts"])
    make = OneHostLauncher if is_local else HostsLauncher
    return make(logs, [], AttachedKeeperLink(connection))
