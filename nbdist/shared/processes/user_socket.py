"""The sockets on which notebooks answer the terminals of the same user, and of no other.

A kernel with a cluster listens on `PID.sock` in a folder that only its user can open. A connection
carries one JSON object in a line each way. Sizes and times are bounded on both ends.
"""

import json
import os
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

QUESTION_BYTES = 4096  # the most that is read of a question, and of an answer
ANSWER_BYTES = 8 << 20
SUFFIX = ".sock"
DETACHED = "detached-"  # begins the names of detached clusters' sockets; a kernel's is its pid


def folders(environment: Mapping[str, str], temp: Path, uid: int) -> list[Path]:
    """Return where sockets may lie, best first; a terminal may have other settings than a kernel.

    Args:
        environment: What says where a user's run-time files are.
        temp: The temp folder.
        uid: The user.
    """
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    found = [Path(runtime) / "nbdist"] if os.path.isabs(runtime) else []
    # `nbdist-` begins the folders of keys. A path of a socket has at most some 100 bytes, which
    # those of temp folders can exceed: hence /tmp too.
    found += [parent / f"nbdist_{uid}_sockets" for parent in (temp, Path("/tmp"))]
    return list(dict.fromkeys([*found, Path(f"/run/user/{uid}/nbdist")]))


def own_folders() -> list[Path]:
    """Return `folders` of this process."""
    return folders(os.environ, Path(tempfile.gettempdir()), os.getuid())


def is_private(folder: Path) -> bool:
    """Return whether `folder` is one, no link, that this user alone can open."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_closed = not stat.S_IMODE(found.st_mode) & 0o077
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and is_closed


def listen(pid: int) -> tuple[socket.socket, Path]:
    """Listen for this user's terminals as kernel `pid`; the caller removes the path.

    Raises:
        OSError: No folder is there that this user alone can open.
    """
    return _listen(str(pid), is_exclusive=False)


def claim(name: str) -> tuple[socket.socket, Path]:
    """Listen by a name that is not in use; the caller removes the path.

    Raises:
        FileExistsError: Somebody has it.
        OSError: As `listen`.
    """
    return _listen(name, is_exclusive=True)


def detached_name(name: str) -> str:
    """Return the name of the socket of the detached cluster `name`."""
    return f"{DETACHED}{name}"


def _listen(name: str, *, is_exclusive: bool) -> tuple[socket.socket, Path]:
    trouble = []
    for folder in own_folders():
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileExistsError):  # a file, too: that of somebody else, perhaps
                folder.mkdir(mode=0o700)
            if not is_private(folder):
                raise PermissionError(f"{folder} can be opened by others")
            # Whoever finds a socket that refuses takes it for a dead kernel's: renamed when it
            # listens.
            unready, path = folder / f"{name}.{os.getpid()}.new", folder / f"{name}{SUFFIX}"
            unready.unlink(missing_ok=True)
            server.bind(str(unready))
            unready.chmod(0o600)
            server.listen()
            if is_exclusive:
                try:
                    path.hardlink_to(unready)
                finally:
                    unready.unlink()
            else:
                unready.rename(path)
            return server, path
        except FileExistsError:
            server.close()
            raise
        except OSError as error:
            server.close()
            trouble.append(str(error))
    raise PermissionError("; ".join(trouble))


def is_this_user(connection: socket.socket) -> bool:
    """Return whether the other end is this user's, where the system tells; else the folder does."""
    if sys.platform != "linux":
        return True
    layout = "3i"
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(layout))
    _, uid, _ = struct.unpack(layout, peer)
    return bool(uid == os.getuid())


def send(connection: socket.socket, value: Mapping[str, Any], timeout_s: float) -> None:
    """Send one object; raises OSError when it is not taken in time."""
    connection.settimeout(timeout_s)
    connection.sendall(json.dumps(value).encode() + b"\n")


def receive(connection: socket.socket, most_bytes: int, timeout_s: float) -> dict[str, Any]:
    """Return the one object that the other end sends.

    Raises:
        OSError: It does not come within `timeout_s`, however slowly it drips.
        ValueError: It is too long, not whole, or no JSON object.
    """
    deadline = time.monotonic() + timeout_s
    parts: list[bytes] = []
    size = 0
    while not parts or not parts[-1].endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        part = connection.recv(1 << 16)
        size += len(part)
        if not part or size > most_bytes:
            raise ValueError("too long" if part else "it ended early")
        parts.append(part)
    try:
        value = json.loads(b"".join(parts))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value
