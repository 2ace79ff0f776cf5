"""What ipyparallel's controller is told, and what it writes of itself for those who connect.

Both lie in a private folder (0700), for they hold the key that signs messages.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from nbdist.client.network import is_loopback

_CLUSTER_ID = "nbdist"
_PING_MS = 150  # an engine is registered only once it has answered one


class ControllerFolder:
    """The folder of one controller, from before its start until `remove`."""

    def __init__(self) -> None:
        """Make it."""
        self._folder = tempfile.TemporaryDirectory(prefix="nbdist-", ignore_cleanup_errors=True)

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
