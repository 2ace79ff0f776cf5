"""The private folders beside the notebook: `.nbdist` and the logs of each cluster."""

import os
import time
from pathlib import Path

from nbdist.errors import StartError


def project_folder(place: Path | None = None) -> Path:
    """Return `.nbdist` beside the notebook (0700, ignored by git), making it if need be.

    Args:
        place: The folder it is in; by default the current one, where Jupyter starts a kernel.

    Raises:
        StartError: That folder cannot be written to.
    """
    folder = (place or Path.cwd()) / ".nbdist"
    try:
        make_private(folder)
    except OSError as error:
        raise _folder_error(folder, error) from error
    return folder


def make_private(folder: Path) -> None:
    """Make `folder` for its owner alone (0700), with a `.gitignore` that ignores all of it.

    Raises:
        OSError: It cannot be made or written to.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")


def log_folder(folder: Path) -> Path:
    """Return a new folder (0700) for the logs of the cluster that starts now.

    Raises:
        StartError: It cannot be made.
    """
    logs = folder / "logs" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    try:
        # One by one: `parents=True` would make the folder in between readable to all.
        for part in (logs.parent, logs):
            part.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _folder_error(logs, error) from error
    return logs


def last_lines(file: Path, count: int = 5) -> str:
    """Return the end of a log as it stands in an error; never raises for the log itself."""
    try:
        text = file.read_text(errors="replace").strip().splitlines()
    except OSError:
        return f"no log at {file}"
    telling = [line for line in text if not any(noise in line for noise in _NOISE)]
    return "\n     ".join(telling[-count:]) or f"its log {file} tells nothing"


# What every healthy rank logs as well.
_NOISE = ("CurveZMQ", "debugpy_stream")


def mend_start(why: str) -> str:
    """Return what to do about a start that failed, where its `why` tells."""
    if "oo many open files" in why:
        return "allow more of them: ulimit -n 4096 in the shell that starts Jupyter."
    if "No space left on device" in why or "Disk quota exceeded" in why:
        return "free space where the logs are, or %cd to another disk."
    return "%dist doctor"


def _folder_error(folder: Path, error: OSError) -> StartError:
    return StartError(
        f"{folder} cannot be made, where logs, runs and checkpoints are kept.",
        why=error.strerror or str(error),
        do="free space, change the permissions, or %cd to a folder of yours.",
    )
