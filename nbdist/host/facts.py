"""What a host is, as far as a start asks: versions, addresses, cores, clock. Imports no torch."""

import os
import platform
import socket
import sys
import time
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from nbdist.shared import background, wire

_COMPARED = ("nbdist", "torch", "ipyparallel", "ipykernel", "pyzmq")


def of_this_host() -> dict[str, Any]:
    """Return plain values about this host and the Python that runs here."""
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {name: _version(name) for name in _COMPARED},
        "messages": wire.VERSION,
        "machine": _machine(),
        "addresses": addresses(),
        "cores": background.cores(),
        "time": time.time(),
        "pid": os.getpid(),
    }


def addresses() -> list[str]:
    """Return this host's IPv4 addresses that others may reach, those of bridges last."""
    import psutil

    found = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    }
    return sorted(found, key=lambda address: found[address].startswith(("docker", "virbr", "br-")))


def _machine() -> str:
    """Return what two Pythons have in common if and only if they share this network."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink(
            "/proc/self/ns/net"
        )
    except OSError:  # not Linux
        return f"{uuid.getnode():x}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"
