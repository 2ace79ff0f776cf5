"""Open MLflow's UI on the prepared view: a server of our own on loopback, or the user's server."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from nbdist.client.tracking.folder import is_locked, make_private_folder, try_lock
from nbdist.client.tracking.settings import (
    is_server,
    mlflow_environment,
    own_database,
    shown_uri,
    split_password,
    tracking_uri,
    whole_uri,
)
from nbdist.client.tracking.shipping import database, view
from nbdist.client.tracking.shipping.shipper import open_log, sync, wait_until_sent
from nbdist.client.tracking.spool import spooled_runs
from nbdist.shared.errors import TrackingError

OPEN_TO_ALL = "It has no password: other users of this machine can open it too."

_HOST = "127.0.0.1"
_SEND_TIMEOUT_S = 30.0
_ATTEMPTS = 2  # another process may take the free port before the server does


def start_ui(
    folder: Path,
    uri: str | None = None,
    experiment: str | None = None,
    wrap: Sequence[str] = (),
    timeout_s: float = 90.0,
) -> tuple[str, "subprocess.Popen[bytes] | None"]:
    """Return the address of MLflow's UI, and the server's process if one had to be started.

    Anybody on this machine can open a page on loopback; it shows runs and can delete them.

    Args:
        folder: The private folder beside the notebook.
        uri: As for `Tracker`.
        experiment: Opens its charts; the newest run's experiment when None.
        wrap: Put before the server's command, to end it with the kernel.
        timeout_s: The longest wait for the server's first answer; ten seconds are usual.

    Raises:
        TrackingError: The server did not come up.
    """
    chosen, credentials = split_password(tracking_uri(folder, uri, os.environ))
    if is_server(chosen):
        return shown_uri(chosen) + view_page(folder, chosen, experiment), None
    make_private_folder(folder)
    if (why := database.trouble(chosen)) and "locked" not in why:
        raise TrackingError(
            f"MLflow's UI cannot open {shown_uri(chosen)}.",
            why=why,
            do="unsent runs are kept: %dist runs --sync sends them afterwards",
        )
    deadline = time.monotonic() + timeout_s
    # What ended a moment ago (a kernel, a demo) may still be in the spool: people who open the
    # UI look for just that run.
    prepare = database.is_missing(folder, chosen)
    sync(folder, _SEND_TIMEOUT_S, prepare=prepare, credentials=credentials)
    wait_until_sent(folder, _SEND_TIMEOUT_S)
    # The server makes the tables of a new database; two processes that do so both fail.
    lock = folder / "create.lock"
    while is_locked(lock) and time.monotonic() < deadline:
        time.sleep(0.1)
    with try_lock(lock):
        started = _start_on_free_port(folder, chosen, credentials, wrap, deadline)
    if started is not None:
        address, process = started
        return address + view_page(folder, chosen, experiment), process
    raise TrackingError(
        "MLflow's UI did not start.",
        why=f"no answer within {timeout_s:g} s; see {folder.name}/logs/mlflow-ui.log",
        do=f"mlflow server --backend-store-uri {shown_uri(chosen)}    in a terminal shows more",
    )


def _start_on_free_port(
    folder: Path,
    uri: str,
    credentials: Mapping[str, str],
    wrap: Sequence[str],
    deadline: float,
) -> "tuple[str, subprocess.Popen[bytes]] | None":
    for _ in range(_ATTEMPTS):
        port = _free_port()
        process = _start(folder, uri, credentials, port, wrap)
        if _answers(f"http://{_HOST}:{port}/health", process, deadline):
            return f"http://{_HOST}:{port}", process
        # The whole group: `wrap` may stand between us and the server.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)
    return None


def view_page(folder: Path, uri: str, experiment: str | None = None) -> str:
    """Return what follows the UI's address to open the prepared view; "" before any run is sent."""
    for run in spooled_runs(folder):
        summary, state = run.summary(), run.state()
        if summary.get("uri") != uri or not state.experiment_id:
            continue
        if experiment is None or summary["experiment"] == experiment:
            return view.page(state.experiment_id)
    return ""  # no run has been sent yet: MLflow's front page


def _start(
    folder: Path, uri: str, credentials: Mapping[str, str], port: int, wrap: Sequence[str]
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "mlflow", "server", "--host", _HOST, "--port", str(port)]
    command += ["--workers", "1"]
    environment = mlflow_environment(os.environ)
    # By the environment, not the command line: a database's URI may hold a password.
    environment["MLFLOW_BACKEND_STORE_URI"] = whole_uri(uri, credentials)
    if uri == own_database(folder):
        environment["MLFLOW_ARTIFACTS_DESTINATION"] = (folder.absolute() / "artifacts").as_uri()
    # Background jobs are for evaluating language models; they cost eight processes.
    environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    with open_log(folder, "mlflow-ui.log") as log:
        return subprocess.Popen(
            [*wrap, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_HOST, 0))
        return int(free.getsockname()[1])


def _answers(url: str, process: "subprocess.Popen[bytes]", deadline: float) -> bool:
    """Return whether the server answers before the deadline; False at once when it has ended."""
    # Without the proxy that the environment may name: this is our own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with opener.open(url, timeout=2) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            # The latter two also where another program was faster to take the port, and speaks no
            # HTTP: the server ends then.
            time.sleep(0.2)
    return False
