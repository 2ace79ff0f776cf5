"""Some test hosts on one switch, from their first boot to the last trace of them."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from tests.hosts import ssh
from tests.hosts.host import Host
from tests.hosts.machine import Site
from tests.hosts.namespaces import pids_in
from tests.hosts.switch import Switch

_DISK_BYTES = 1 << 30


class Bed(AbstractContextManager["Bed"]):
    """Hosts that know each other by name: `with Bed() as bed: bed["a"].run(["ssh", "b", "true"])`.

    Args:
        names: Of the hosts, in the order of their addresses, from 10.77.0.1.
        binds: Files and folders of this machine, and what each is mounted over in every host.
    """

    def __init__(
        self, names: Sequence[str] = ("a", "b", "c", "d"), binds: dict[str, str] | None = None
    ) -> None:
        # /tmp, /root and /run are each host's own. The name tells which process to ask.
        self.folder = Path(tempfile.mkdtemp(prefix=f"nbdist-hosts-{os.getpid()}-", dir="/var/tmp"))
        self.shared = self.folder / "shared"
        self._closing = ExitStack()
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._build(names, binds or {})
            on_failure.pop_all()

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def reset(self) -> None:
        """Put right what a test has broken or left running: such hosts boot again."""
        broken = [host for host in self.hosts.values() if not _is_healthy(host)]
        if not broken:
            return
        self.switch.deliver_all()
        for host in broken:
            host.switch_off()
            host.repair()
            host.start_boot()
        for host in broken:
            host.wait_for_boot()

    def close(self) -> None:
        """Switch everything off, and delete what is on disk."""
        self._closing.close()

    def leftovers(self) -> list[str]:
        """Return what `close` has left behind: processes, mounts and files."""
        ids = set().union(*(host.namespace_ids for host in self.hosts.values()))
        left = [f"process {pid}" for pid in pids_in(ids | self.switch.namespace.ids)]
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        left += [line for line in mounts if str(self.folder) in line]
        return left + [str(path) for path in (self.folder,) if path.exists()]

    def _build(self, names: Sequence[str], binds: dict[str, str]) -> None:
        self._closing.callback(shutil.rmtree, self.folder)
        self.shared.mkdir()
        self.switch = Switch(self.folder)
        self._closing.callback(self.switch.namespace.kill)
        addresses = {name: f"10.77.0.{index}" for index, name in enumerate(names, start=1)}
        site = Site(self.folder, self.switch, _DISK_BYTES, binds)
        site.keys.mkdir()
        ssh.make_keys(site.keys, addresses)
        self.hosts = {
            name: Host(site, name, address, addresses) for name, address in addresses.items()
        }
        for host in self.hosts.values():
            self._closing.callback(host.switch_off)
            host.start_boot()
        for host in self.hosts.values():
            host.wait_for_boot()


def _is_healthy(host: Host) -> bool:
    return host.is_on and not host.is_touched and not host.left_running()
