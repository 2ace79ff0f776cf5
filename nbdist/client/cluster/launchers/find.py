"""Find the launcher of a name: `local`, or one that an installed package offers.

A package offers one as an entry point of the group `nbdist.launchers`: a callable that takes the
folder of the logs and returns a `Launcher`.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from nbdist.client.cluster.launchers.base import Launcher
from nbdist.client.cluster.launchers.local import LocalLauncher
from nbdist.errors import UsageError

GROUP = "nbdist.launchers"
LOCAL = "local"


def find_launcher(name: str) -> Callable[[Path], Launcher]:
    """Return what makes the launcher of this name.

    Raises:
        UsageError: There is none.
    """
    if name == LOCAL:
        return LocalLauncher
    offered = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in offered:
        known = ", ".join([LOCAL, *sorted(offered)])
        raise UsageError(f"There is no launcher {name!r}.", do=f"use one of: {known}")
    made: Callable[[Path], Launcher] = offered[name].load()
    return made
