"""What a dry cell does not do: writing to disk, starting processes, and waiting."""

import builtins
import io
import os
import sys
import tempfile
import time
from typing import Any

from nbdist.engine.dry.unknown import NotKnownError

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = {
    **{f"os.{name}": "changes files" for name in ("remove", "rename", "rmdir", "link", "symlink")},
    **{f"os.{name}": "changes files" for name in ("truncate", "chmod", "chown", "utime")},
    "shutil.rmtree": "changes files",
    "subprocess.Popen": "starts a process",
    "os.system": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.exec": "starts a process",
    "os.fork": "starts a process",
    "os.kill": "sends a signal",
    "socket.bind": "opens a port",
    "socket.connect": "connects to a server",
}


def refuse() -> None:
    """Throw away what is written to files, and refuse the rest. Of this process, for good."""
    scratch = tempfile.gettempdir()
    sys.dont_write_bytecode = True
    really_open = open

    def into_nothing(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        writes = isinstance(mode, str) and set(mode) & set("wax+")
        path = os.devnull if writes and not isinstance(file, int) else file
        return really_open(path, mode.replace("x", "w"), *rest, **options)

    builtins.open = io.open = into_nothing
    for name in ("mkdir", "makedirs"):
        setattr(os, name, lambda *_, **__: None)
    time.sleep = lambda _seconds: None

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[2], int) and given[2] & _WRITES:
            path = os.fspath(given[0]) if not isinstance(given[0], int) else os.devnull
            if not os.fsdecode(path).startswith(("/dev/", "/proc/", scratch)):
                raise NotKnownError(f"it writes to {os.fsdecode(path)}, which a dry cell does not")
        elif event in _REFUSED:
            raise NotKnownError(f"it {_REFUSED[event]} ({event}), which a dry cell does not")

    sys.addaudithook(hear)
