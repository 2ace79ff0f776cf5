"""A test host as such: it boots, runs commands, and says what runs in it."""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.groups import ROOT
from tests.hosts import commands, ssh
from tests.hosts.namespaces import Namespace, pids_in
from tests.hosts.switch import Switch

HOME = str(Path("~").expanduser())
_BOOT_TIMEOUT_S = 60
_KINDS = ("net", "mount", "uts", "ipc", "pid")

# What every program in a host has, also after a login by ssh: the nbdist of this checkout, as if
# it were installed on each host.
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "1",
}
_PATH = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Site:
    """What the hosts of one bed share: a folder on this machine, the switch, files seen inside."""

    folder: Path
    switch: Switch
    disk_bytes: int
    binds: dict[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> Path:
        return self.folder / "keys"


class Machine:
    """A host named `name`, at `address`; it is off until it boots."""

    def __init__(self, site: Site, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.site = site
        self.folder = site.folder / name
        self._namespace: Namespace | None = None
        self._services: set[int] = set()
        self._started: list[subprocess.Popen[str]] = []
        self.environment: dict[str, str] = {}
        self.namespace_ids: set[str] = set()
        for part in ("disk", "keep"):
            (self.folder / part).mkdir(parents=True)
        ssh.write_client(self.folder / "ssh", site.keys)

    @property
    def is_on(self) -> bool:
        return self._namespace is not None and self._namespace.is_alive

    @property
    def namespace(self) -> Namespace:
        assert self._namespace is not None, f"host {self.name} is off"
        return self._namespace

    def start_boot(self) -> None:
        """Switch on; `wait_for_boot` follows. Several hosts boot at the same time."""
        sshd_config = self.folder / "sshd_config"
        ssh.write_server(
            sshd_config, self.site.keys, self.name, {**ENVIRONMENT, **self.environment}
        )
        settings = {
            "name": self.name,
            "folder": str(self.folder),
            "home": HOME,
            "disk_bytes": self.site.disk_bytes,
            "sshd_config": str(sshd_config),
            "visible": _visible_paths(),
            "binds": [*self.site.binds.items(), (str(self.folder / "hosts"), "/etc/hosts")],
        }
        init = [
            sys.executable,
            "-I",
            str(Path(__file__).with_name("init.py")),
            json.dumps(settings),
        ]
        with (self.folder / "init.log").open("ab") as log:
            self._namespace = Namespace(_KINDS, init, log)
        self.namespace_ids |= self._namespace.ids
        self.site.switch.plug_in(self.name, self._namespace, self.address)

    def wait_for_boot(self) -> None:
        """Return when the host answers ssh."""
        stdout = self.namespace.stdout
        readable, _, _ = select.select([stdout], [], [], _BOOT_TIMEOUT_S)
        if not readable or stdout.readline() != b"ready\n":
            log = (self.folder / "init.log").read_text() + (self.folder / "sshd.log").read_text()
            raise commands.CommandFailed(f"host {self.name} does not boot:\n{log}")
        self.count_as_services()

    def switch_off(self) -> None:
        """Kill all that runs, and take the network card away."""
        if self._namespace is not None:
            if self.is_on:
                self.continue_all()
            self._namespace.kill()
            self._namespace = None
            self.site.switch.unplug(self.name)
        for process in self._started:
            process.wait(10)
            commands.close_pipes(process)
        self._started.clear()

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float = 60,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the home of this host to its end, and return its output.

        Raises:
            CommandFailed: it failed (unless `check` is false), or took longer than `timeout_s`.
        """
        words = self.command(command, env)
        return commands.call(words, timeout_s=timeout_s, stdin=stdin, check=check)

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start a command in the home of this host, with pipes to its stdin, stdout and stderr.

        The process returned is the one that entered the host, and leads a group with the command:
        `os.killpg(process.pid, signal)` reaches both, `child_pid(process)` is the command alone.
        The command ends with it, and with the test.
        """
        process = subprocess.Popen(
            self.command(command, env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def command(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
        """Return the words that run `command` in this host, in its home."""
        own = {
            "HOME": HOME,
            "USER": "root",
            "LOGNAME": "root",
            "PATH": _PATH,
            **ENVIRONMENT,
            **self.environment,
        }
        variables = [f"{key}={value}" for key, value in {**own, **(env or {})}.items()]
        enter = self.namespace.enter()
        # Who enters can be killed from here, and takes the command along.
        die_too = ["setpriv", "--pdeathsig", "KILL"]
        return [*enter, "env", "-i", f"--chdir={HOME}", *variables, *die_too, *command]

    def count_as_services(self) -> None:
        """Let `left_running` not count what runs now: daemons that a test was given."""
        self._services = set(self.pids())

    def path(self, inside: str) -> Path:
        """Return what the test opens to reach a file of this host; names start at its home."""
        return Path(f"/proc/{self.namespace.pid}/root", str(Path(HOME, inside)).lstrip("/"))

    def write(self, inside: str, text: str) -> None:
        """Write a file in this host; names start at its home."""
        self.path(inside).write_text(text)

    def pids(self) -> list[int]:
        """Return all processes of this host, by their ids here."""
        own = os.readlink(f"/proc/{self.namespace.pid}/ns/pid")
        return pids_in({own})

    def continue_all(self) -> None:
        """Let stopped processes go on, and those who entered with them: nsenter stops as they do.

        A stopped nsenter reaps nothing, so that the end of the host would wait for it.
        """
        for pid in self.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                parent = process.parent()
                process.resume()
                if parent is not None:
                    parent.resume()

    def left_running(self) -> list[str]:
        """Return what runs in this host beside its services: one line a process."""
        lines = []
        for pid in set(self.pids()) - self._services:
            try:
                lines.append(f"{pid} {' '.join(psutil.Process(pid).cmdline())}")
            except psutil.NoSuchProcess:
                continue
        return sorted(lines)


def _visible_paths() -> list[str]:
    """Return what a host may read of this machine, wherever it lies: Python and this checkout."""
    paths = {Path(path).resolve() for path in (sys.prefix, sys.base_prefix, ROOT)}
    return sorted(str(path) for path in paths)
