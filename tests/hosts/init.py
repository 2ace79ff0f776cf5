"""Process 1 of a test host: makes the host's own view of the machine, and starts its sshd.

Run as `python -I init.py SETTINGS`; needs the standard library only, for it starts before the host
sees anything else. Prints `ready` when ssh answers. Then it reaps orphans, as any process 1 does.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_READY_TIMEOUT_S = 50.0


def main() -> None:
    """Boot."""
    settings = json.loads(sys.argv[1])
    socket.sethostname(settings["name"])
    _mount_disk(settings)
    _mount_system(settings["folder"])
    for outside, inside in settings["binds"]:
        _mount("--bind", outside, inside)
    _run("ip", "link", "set", "lo", "up")
    with Path(settings["folder"], "sshd.log").open("ab") as log:
        subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-e", "-f", settings["sshd_config"]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
        )
    _wait_for_ssh()
    print("ready", flush=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.1)


def _mount_disk(settings: dict[str, Any]) -> None:
    """Mount the host's own disk over /tmp and home, where only the visible paths remain."""
    disk = Path(settings["folder"], "disk")
    keep = Path(settings["folder"], "keep")
    home = settings["home"]
    visible = [Path(path) for path in settings["visible"]]
    for index, path in enumerate(visible):
        (keep / str(index)).mkdir(parents=True, exist_ok=True)
        _mount("--bind", str(path), str(keep / str(index)))
    _mount("-t", "tmpfs", "-o", f"size={settings['disk_bytes']}", "disk", str(disk))
    for name, mode, place in (("home", 0o700, home), ("tmp", 0o1777, "/tmp")):
        (disk / name).mkdir()
        (disk / name).chmod(mode)
        _mount("--bind", str(disk / name), place)
    for index, path in enumerate(visible):
        path.mkdir(parents=True, exist_ok=True)
        _mount("--bind", str(keep / str(index)), str(path))
        _mount("-o", "remount,bind,ro", str(path))
    shutil.copytree(Path(settings["folder"], "ssh"), Path(home, ".ssh"))


def _mount_system(folder: str) -> None:
    """Mount what the kernel shows a host of its own: /dev/shm, /run, /sys with its network."""
    _mount("-t", "tmpfs", "-o", "mode=1777", "shm", "/dev/shm")
    _mount("-t", "tmpfs", "-o", "mode=755", "run", "/run")
    for name in ("sshd", "munge", "lock"):
        Path("/run", name).mkdir()
    # /sys shows the interfaces of the namespace that mounts it; what is mounted in it, Slurm's
    # control groups, is kept.
    cgroups = Path(folder, "cgroup")
    cgroups.mkdir(exist_ok=True)
    _mount("--rbind", "/sys/fs/cgroup", str(cgroups))
    _mount("-t", "sysfs", "sysfs", "/sys")
    _mount("--rbind", str(cgroups), "/sys/fs/cgroup")


def _wait_for_ssh() -> None:
    """Wait until sshd listens. A connection would tell as well, and leave a session for a while."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not _is_listening(22):
        if time.monotonic() > deadline:
            raise TimeoutError(f"sshd did not listen within {_READY_TIMEOUT_S} s")
        time.sleep(0.01)


def _is_listening(port: int) -> bool:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def _mount(*words: str) -> None:
    _run("mount", "-n", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=50)


if __name__ == "__main__":
    main()
