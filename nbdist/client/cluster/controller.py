"""What ipyparallel's controller is told, and what it writes of itself for those who connect.

Both lie in a private folder (0700), for they hold the key that signs messages. It goes with the
controller: the parent removes it, or the controller itself when the kernel has ended. Where all
three were killed at once, the next start does: a folder's owner holds a lock in it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from nbdist.options import is_loopback

_CLUSTER_ID = "nbdist"
_PREFIX = "nbdist-"
_LOCK = "owner.lock"
_PING_MS = 150  # an engine is registered only once it has answered one


class ControllerFolder:
    """The folder of one controller, from before its start until `remove`."""

    def __init__(self) -> None:
        """Make it."""
        remove_orphans(Path(tempfile.gettempdir()))
        while True:
            self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
            self._lock = os.open(Path(self.path) / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.exists(self.path):
                break
            os.close(self._lock)  # somebody took it for an orphan before it was locked

    @property
    def path(self) -> str:
        """Where it is: IPython's profile folder of controller and engines."""
        return self._folder.name

    def spec(self, address: str) -> dict[str, Any]:
        """Return what a controller that listens on `address` is told."""
        return {
            "profile_dir": self.path,
            "cluster_id": _CLUSTER_ID,
            "address": address,
            "encrypt": not is_loopback(address),
            "ping_ms": _PING_MS,
        }

    def connection_file(self, side: str) -> Path:
        """Return the file by which a `client` or an `engine` connects."""
        return Path(self.path) / "security" / f"ipcontroller-{_CLUSTER_ID}-{side}.json"

    def facts(self) -> dict[str, Any] | None:
        """Return what the controller has written for its clients; None until it is whole."""
        try:
            facts: dict[str, Any] = json.loads(self.connection_file("client").read_text())
        except (OSError, ValueError):
            return None
        return facts

    def remove(self) -> None:
        """Remove it with all that is in it."""
        self._folder.cleanup()
        os.close(self._lock)


def remove_orphans(temp: Path) -> None:
    """Remove this user's folders in `temp` whose owners have ended, with the keys in them."""
    for lock in temp.glob(f"{_PREFIX}*/{_LOCK}"):
        # Somebody else's, gone meanwhile, or locked by an owner that lives.
        with contextlib.suppress(OSError):
            if lock.lstat().st_uid != os.getuid() or lock.is_symlink():
                continue
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
