"""The folder of ipyparallel's controller: its settings, and the connection files it writes.

The folder is private (0700): its files hold the key that signs messages. The parent removes it
with the controller, or the controller itself does when the kernel has ended. Where all three were
killed at once, the next start does: the kernel and the controller hold a lock in it.
"""

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import weakref
from pathlib import Path
from typing import Any

from nbdist.shared.options import is_loopback
from nbdist.shared.processes import key_folder
from nbdist.shared.processes.key_folder import KEYS, OWNER_LOCK

_CLUSTER_ID = "nbdist"
_PREFIX = "nbdist-"
_PING_MS = 150  # an engine is registered only once it has answered one


class ControllerFolder:
    """The folder of one controller, from before its start until `remove`."""

    def __init__(self) -> None:
        """Make it."""
        remove_orphans(Path(tempfile.gettempdir()))
        while True:
            self._own(tempfile.mkdtemp(prefix=_PREFIX))
            if os.path.exists(self.path):
                os.write(self._lock, _mark(self.path))
                break
            os.close(self._lock)  # another start took it for an orphan before it was locked

    @classmethod
    def adopt(cls, path: str) -> "ControllerFolder":
        """Go on with the folder of a controller that another kernel has started.

        Raises:
            OSError: It is gone, and so is the controller.
        """
        folder = cls.__new__(cls)
        folder._own(path)
        return folder

    def _own(self, path: str) -> None:
        self.path = path  # IPython's profile folder of controller and engines
        self._lock = os.open(Path(path) / OWNER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        # Shared: the controller holds it too (`host/controller.py`).
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._remove = weakref.finalize(self, key_folder.remove, path)

    def spec(self, address: str) -> dict[str, Any]:
        """Return the settings of a controller that listens on `address`."""
        return {
            "profile_dir": self.path,
            "cluster_id": _CLUSTER_ID,
            "address": address,
            "encrypt": not is_loopback(address),
            "ping_ms": _PING_MS,
        }

    def connection_file(self, side: str) -> Path:
        """Return the file by which a `client` or an `engine` connects."""
        return Path(self.path) / KEYS / f"ipcontroller-{_CLUSTER_ID}-{side}.json"

    def facts(self) -> dict[str, Any] | None:
        """Return what the controller has written for its clients; None until it is whole."""
        try:
            facts: dict[str, Any] = json.loads(self.connection_file("client").read_text())
        except (OSError, ValueError):
            return None
        return facts

    def remove(self) -> None:
        """Remove it with all that is in it."""
        self._remove()
        os.close(self._lock)

    def leave(self) -> None:
        """Leave the folder to its controller, which keeps running."""
        self._remove.detach()
        os.close(self._lock)


def find_orphans(temp: Path) -> list[Path]:
    """Return this user's folders in `temp` that are proven to be of owners that have ended."""
    found = []
    for lock in sorted(temp.glob(f"{_PREFIX}*/{OWNER_LOCK}")):
        if (descriptor := _take_orphan(lock)) is not None:
            os.close(descriptor)
            found.append(lock.parent)
    return found


def remove_orphans(temp: Path) -> None:
    """Remove what `find_orphans` would find, with the keys in it."""
    for lock in temp.glob(f"{_PREFIX}*/{OWNER_LOCK}"):
        if (descriptor := _take_orphan(lock)) is not None:
            key_folder.remove(lock.parent)
            os.close(descriptor)


def _take_orphan(lock: Path) -> int | None:
    """Lock the folder of an owner that has ended; None where that is not proven.

    The proof: a private folder of this user, no link to one, with a lock that is free and in which
    its owner has named this very folder. A name alone proves nothing, nor does a copy.
    """
    try:
        folder = lock.parent.lstat()
        is_private = folder.st_uid == os.getuid() and not stat.S_IMODE(folder.st_mode) & 0o077
        if not stat.S_ISDIR(folder.st_mode) or not is_private:
            return None
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None  # another user's, or gone by now
    with contextlib.suppress(OSError):  # locked by an owner that lives, or no file at all
        mark = _mark(str(lock.parent))
        if os.read(descriptor, len(mark) + 1) == mark:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    os.close(descriptor)
    return None


def _mark(folder: str) -> bytes:
    """Return what an owner writes into the lock of its folder."""
    return b"nbdist keeps a controller's keys in " + os.fsencode(os.path.realpath(folder)) + b"\n"
