"""`nbdist.attach` and `%dist attach`: a detached cluster, found again from another kernel.

No process is started. The keeper reports what the last kernel knew, and what has ended since; ranks
report what they do; a cell that runs is followed to its end.
"""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nbdist.client.cells.cell_context import CellContext
from nbdist.client.cells.interrupts import hold_interrupts
from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.folders import living_logs
from nbdist.client.cluster.launchers.detached import attached_launcher
from nbdist.client.notebook import current
from nbdist.client.notebook.log_file import log_to
from nbdist.client.session.session import Session
from nbdist.shared import side
from nbdist.shared.errors import ClusterError
from nbdist.shared.processes import detached


def attach(name: str | None = None, *, say: Callable[[str], None] | None = None) -> Session:
    """Go on with a detached cluster of this user's, on this machine.

    What ranks hold is as it was. A cell that runs is shown and waited for: an interrupt of this
    kernel interrupts it, as ever. `Session.last` is what it gave.

    Args:
        name: The cluster's; by default the only one that no kernel has.
        say: Gets what has happened meanwhile; `print` by default.

    Returns:
        The session, which is the kernel's from here on, also when the cell's error is raised.

    Raises:
        ClusterError: There is none, another kernel has it, or it cannot be reached; or this kernel
            has a cluster.
        RankError: The cell failed on a rank.
        KeyboardInterrupt: The cell was interrupted.
        UsageError: This is a rank.
    """
    side.require_notebook("nbdist.attach")
    if current.is_running():
        raise ClusterError(
            f"A cluster is already running: {current.current().describe}.",
            do="%dist stop ends it; a detached one stays when this kernel is restarted.",
        )
    found = detached.choose(detached.find(), name)
    show = say or print
    with hold_interrupts():
        connection, known = detached.attach(found, os.getpid())
        session = _session(found.name, known["memory"], known, connection)
        show(f"Attached to {found.name}: {session.describe}.")
    done = session.finish_cell()
    if isinstance(done, str) and done:
        show(done)
    return session


def _session(
    name: str, memory: Mapping[str, Any], known: Mapping[str, Any], connection: socket.socket
) -> Session:
    """Return the session, which is the kernel's by then; leaves the cluster alone on failure."""
    facts, of_session = memory["cluster"], memory["session"]
    logs = living_logs(Path(facts["logs"]))
    launcher = attached_launcher(facts["launcher"], logs, connection)
    cluster = Cluster(launcher, logs)
    log_to(logs / "notebook.log")
    try:
        cluster.adopt(facts, known)
    except BaseException:
        cluster.leave()
        raise
    showing = CellContext(Path(of_session.pop("folder")), **of_session)
    session = Session(cluster, showing, str(cluster.options))
    session.go_on(name, memory, launcher.remember)
    current.keep(launcher, f"attached {name}")
    current.take_over(session, Path(facts["place"]) if facts["place"] else None)
    return session
