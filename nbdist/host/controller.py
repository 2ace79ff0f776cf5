"""ipyparallel's controller, with a lifeline to the notebook's kernel.

No task scheduler and no payload database: nbdist never balances load, and a database would
keep every pushed array in memory (more than 1 GB after a few pushes).
"""

import fcntl
import multiprocessing.connection
import os
import secrets
import sys
import threading
import time
from typing import Any

from nbdist.shared.processes import key_folder, lifeline
from nbdist.shared.processes.key_folder import OWNER_LOCK


def arguments(profile_dir: str, cluster_id: str, address: str, ping_ms: int) -> list[str]:
    """Return `ipcontroller`'s command line.

    Args:
        profile_dir: Private folder (0700) that will hold the connection files.
        cluster_id: Names the connection files.
        address: Interface every socket binds to, such as 127.0.0.1.
        ping_ms: Heartbeat period where `heartbeat` has none of its own. An engine counts as
            registered after it has answered one.
    """
    return [
        f"--profile-dir={profile_dir}",
        f"--cluster-id={cluster_id}",
        # By default the folder in which ipyparallel was imported, which may be gone.
        f"--work-dir={profile_dir}",
        f"--ip={address}",
        f"--location={address}",
        f"--ping={ping_ms}",
        # The parent sees a rank end at once. A rank that is stopped, or on a machine that swaps,
        # answers no ping, and must not be taken for dead.
        "--HeartMonitor.max_heartmonitor_misses=1000000",
        "--nodb",
        "--scheme=none",
        "--IPController.broadcast_scheduler_depth=0",
        "--log-level=40",  # at 30 it has a line for each message of ours
    ]


def run(spec: dict[str, Any]) -> None:
    """Become the controller; returns when it stops. The caller leads its own session."""
    from ipyparallel.controller.app import IPController

    from nbdist.host import heartbeat, relay

    heartbeat.install()
    _own(spec["profile_dir"])
    lifeline.watch(spec["kernel_pid"], lambda: _end(spec["profile_dir"]))
    argv = arguments(spec["profile_dir"], spec["cluster_id"], spec["address"], spec["ping_ms"])
    sys.argv = ["ipcontroller", *argv]
    controller = IPController.instance(config=_security(encrypt=spec["encrypt"]))
    relay.install(controller)
    controller.initialize(argv)
    threading.Thread(target=_watch, args=(controller,), name="nbdist-children", daemon=True).start()
    controller.start()


def _watch(controller: Any) -> None:
    """End with the first of the controller's own processes that ends.

    Where one could not bind its port, no rank would ever be registered, and nothing would say why.
    """
    while controller.heartmonitor_process.ident is None:  # it is started last
        time.sleep(0.01)
    queues = [getattr(part, "launcher", part) for part in controller.children]
    processes = [*queues, controller.heartmonitor_process]
    ended = multiprocessing.connection.wait([child.sentinel for child in processes])
    names = [child.name for child in processes if child.sentinel in ended]
    print(f"{names} of the controller ended by itself", file=sys.stderr, flush=True)
    lifeline.end_own_session()


def _security(*, encrypt: bool) -> Any:
    """Return the settings that must not stand on a command line, where everyone reads them.

    With CURVE, ipyparallel leaves messages unsigned unless it is given a key. A CURVE server takes
    every client that knows its public key; the signature asks for a secret as well.
    """
    from traitlets.config import Config

    config = Config()
    config.Session.key = secrets.token_hex(32).encode()
    config.Session.signature_scheme = "hmac-sha256"
    if encrypt:
        config.IPController.enable_curve = True
    return config


def _own(profile_dir: str) -> None:
    """Hold the lock of the folder, with all children: the kernel may go, and leave it to us."""
    lock = os.open(os.path.join(profile_dir, OWNER_LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)


def _end(profile_dir: str) -> None:
    """Remove the connection keys, then end; the parent may have been killed before the kernel."""
    key_folder.remove(profile_dir)
    lifeline.end_own_session()


def main(argv: list[str]) -> None:
    """Run as a fresh interpreter: `python -m nbdist.host.controller '{...}'`."""
    import json

    os.setsid() if os.getsid(0) != os.getpid() else None
    run(json.loads(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
