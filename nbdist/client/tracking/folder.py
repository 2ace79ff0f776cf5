"""Make the private folder beside a notebook, and the locks that live in it.

`.nbdist/` holds `mlflow.db`, artifacts, the spool, logs and checkpoints. Only its owner may look
inside, and git ignores it, so that a run's source and figures are not shared by accident.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from nbdist.client.cluster.folders import make_private
from nbdist.shared.errors import TrackingError

_OPENS_PRIVATE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC


def make_private_folder(folder: Path) -> Path:
    """Make the private folder, as `nbdist.client.cluster.folders` does for logs.

    Raises:
        TrackingError: The folder cannot be made or written to.
    """
    try:
        make_private(folder)
    except OSError as error:
        raise TrackingError(
            f"The folder {folder} cannot be written to, so runs cannot be kept.",
            why=error.strerror or str(error),
            do="free space or change its permissions, or run the cell with --no-track.",
        ) from error
    return folder


def write_private(path: Path, data: bytes) -> None:
    """Replace the file at `path` in one step; readers see the old bytes or the new (0600)."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, _OPENS_PRIVATE | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    os.replace(draft, path)


def open_private(path: Path) -> IO[bytes]:
    """Open the file at `path` to append bytes to it (0600)."""
    return os.fdopen(os.open(path, _OPENS_PRIVATE | os.O_APPEND, 0o600), "ab")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; empty when there is no such file or it was cut short."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        # `write_private` never leaves half a file, but a full disk or a pulled plug can.
        return {}
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Hold the lock file at `path` for the block; yields False when another process holds it.

    The kernel of the operating system frees the lock when its holder dies, however it dies.
    """
    with open_private(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock file at `path`."""
    try:
        with path.open("rb") as file:
            # Shared: another one who only asks must not look like the holder.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
