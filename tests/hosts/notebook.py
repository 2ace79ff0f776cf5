"""Hosts for a notebook, whose kernel joins the first of them: `11_many_hosts.ipynb` uses them.

The kernel stays the process it is. Only its main thread enters the network of the first host, and
all that it starts from then on, while its connection to Jupyter stays where it was.
"""

import atexit
import ctypes
import os
import sys
from pathlib import Path

from tests.hosts import requirements
from tests.hosts.bed import Bed

_CLONE_NEWNET = 0x40000000


def make_hosts(*names: str) -> Bed:
    """Return new hosts, the first of which this kernel is on; `ssh NAME` works to the others.

    Raises:
        RuntimeError: This machine cannot have them.
    """
    why = "Linux has network namespaces" if sys.platform != "linux" else requirements.missing()
    if why:
        raise RuntimeError(f"No hosts can be made here: {why}. Name your own in --hosts.")
    bed = Bed(names)
    atexit.register(bed.close)
    _enter_network_of(bed[names[0]].namespace.pid)
    _teach_ssh(bed.folder, names)
    return bed


def _enter_network_of(pid: int) -> None:
    """Move this thread into the network of a process, as setns(2) does; Python 3.12 has it."""
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


def _teach_ssh(folder: Path, names: tuple[str, ...]) -> None:
    """Put an `ssh` first in PATH that knows the hosts: the user's own settings stay as they are."""
    config = folder / "ssh_config"
    lines = [
        f"Host {name}\n  HostName 10.77.0.{index}\n" for index, name in enumerate(names, start=1)
    ]
    keys = folder / "keys"
    lines.append(
        f"Host *\n  User root\n  IdentityFile {keys}/id_ed25519\n"
        f"  UserKnownHostsFile {keys}/known_hosts\n"
    )
    config.write_text("".join(lines))
    script = folder / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {config} "$@"\n')
    script.chmod(0o755)
    os.environ["PATH"] = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
