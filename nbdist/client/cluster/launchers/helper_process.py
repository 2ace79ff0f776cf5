"""Start one of nbdist's small processes beside the kernel: this machine's parent, the keeper.

It has the other end of a socket pair, a session of its own, and an environment without secrets.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nbdist.client.cluster.folders import fix_for_start
from nbdist.shared.errors import StartError
from nbdist.shared.options import HASH_SEED

# Secrets of the notebook's server and of the tracking server: nothing on a rank needs them.
_KEPT_FROM_RANKS = (
    "JPY_API_TOKEN",
    "JUPYTER_TOKEN",
    "JUPYTERHUB_API_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment ranks start from: the kernel's, without secrets that are not theirs.

    OpenBLAS and OpenMP start their threads when numpy is imported, and a parent with threads
    must not fork: the parent runs with one each, and a rank sets its own number later. The order of
    a set of texts follows from `PYTHONHASHSEED`: all parents have the same.
    """
    kept = {k: v for k, v in environment.items() if k not in _KEPT_FROM_RANKS}
    if "@" in kept.get("MLFLOW_TRACKING_URI", ""):
        del kept["MLFLOW_TRACKING_URI"]  # it holds a password; runs are tracked by the notebook
    # Warnings that are errors would end ranks for what one library thinks of another. A cell may
    # still ask for them.
    if "PYTHONWARNINGS" in kept:
        kept["PYTHONWARNINGS"] = _as_warnings(kept["PYTHONWARNINGS"])
    # What the notebook can import, its ranks can: nbdist itself, run from a checkout, and what a
    # cell has added to sys.path.
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if kept.get("PYTHONHASHSEED", "random") == "random":
        kept["PYTHONHASHSEED"] = HASH_SEED
    kept.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    return kept


def _as_warnings(filters: str) -> str:
    """Return PYTHONWARNINGS with what it makes errors shown instead."""
    parts = [part.strip() for part in filters.split(",")]
    # Python takes any beginning of the word, "e" too.
    actions = [part.partition(":") for part in parts]
    return ",".join(
        "".join(("default", colon, rest)) if action and "error".startswith(action) else part
        for part, (action, colon, rest) in zip(parts, actions, strict=True)
    )


def start_helper(
    module: str, *words: str, log: Path, what: str
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start `python -m MODULE FD PID WORDS`; return the process, and this end of the pair.

    Args:
        module: What it runs. FD is its end of the pair, PID this process.
        words: More for its command line.
        log: For its output.
        what: It, in an error's words.

    Raises:
        StartError: It could not be started.
    """
    ours, theirs = socket.socketpair()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=[theirs.fileno()],
            env=rank_environment(os.environ),
            # Jupyter interrupts the kernel's whole process group.
            start_new_session=True,
        )
    except BaseException as error:
        ours.close()  # an interrupt: the process, if it exists by now, ends by this
        if isinstance(error, OSError):
            raise StartError(
                f"{what} could not be started.",
                why=f"{sys.executable}: {error.strerror}",
                do=fix_for_start(error.strerror or ""),
            ) from error
        raise
    finally:
        os.close(file)
        theirs.close()
    return process, ours
