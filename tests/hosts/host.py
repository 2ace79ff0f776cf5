"""A test host with what can go wrong with it; `Bed.reset` puts it right again."""

import os
import signal
from pathlib import Path
from typing import Literal

from tests.hosts import switch
from tests.hosts.commands import call
from tests.hosts.machine import Machine, Site
from tests.hosts.waiting import wait_until


class Host(Machine):
    """A host named `name`, at `address`, and its faults."""

    def __init__(self, site: Site, name: str, address: str, names: dict[str, str]) -> None:
        super().__init__(site, name, address)
        self._names = names
        self.is_touched = False
        self.name_itself(address)

    def power_cut(self) -> None:
        """End the host between two packets: its peers hear nothing, not even a closed socket."""
        self.is_touched = True
        self.site.switch.set_port(self.name, up=False)
        self.switch_off()

    def shut_down(self) -> None:
        """End the host, whose kernel closes all connections, as at a shutdown."""
        self.is_touched = True
        self.switch_off()

    def power_on(self) -> None:
        """Boot again, with an empty disk."""
        self.start_boot()
        self.wait_for_boot()

    def link_down(self) -> None:
        """Pull the cable."""
        self.is_touched = True
        self.site.switch.set_port(self.name, up=False)

    def link_up(self) -> None:
        """Plug the cable in again."""
        self.site.switch.set_port(self.name, up=True)

    def cut(self, direction: Literal["in", "out"], peer: "Host | None" = None) -> None:
        """Lose what comes in or goes out (to and from `peer` only), on a cable that looks fine."""
        self.is_touched = True
        other = peer.name if peer else None
        if direction == "out":
            self.site.switch.drop(sender=self.name, receiver=other)
        else:
            self.site.switch.drop(sender=other, receiver=self.name)

    def pause(self) -> None:
        """Stop all processes where they are; the kernel goes on acknowledging packets."""
        self.is_touched = True
        wait_until(self._stop_all, f"all processes of {self.name} are stopped")

    def resume(self) -> None:
        """Let all processes go on."""
        self.continue_all()

    def shape(self, rate: str) -> None:
        """Limit this host's link in both directions, to "100mbit" for example."""
        self.is_touched = True
        self.site.switch.shape(self.name, rate)
        call([*self.namespace.enter("net"), *switch.limit_rate("eth0", rate)])

    def replace(self, path: str, text: str) -> None:
        """Let a file of this machine have another text in this host: another version, say."""
        self.is_touched = True
        other = f"{self.folder}/disk/{abs(hash(path))}"
        self.path(other).write_text(text)
        self.run(["mount", "-n", "--bind", other, path])

    def delay(self, delay_s: float) -> None:
        """Let each packet from and to this host take `delay_s` longer: twice that for an answer."""
        self.is_touched = True
        self.site.switch.delay(self.name, delay_s)

    def shift_clock(self, seconds: int) -> None:
        """Boot again with a clock that is wrong by `seconds`, for programs, not for the kernel."""
        self.switch_off()
        (library,) = Path("/usr/lib").glob("*/faketime/libfaketime.so.1")
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME": f"{seconds:+d}s",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self.power_on()
        self.is_touched = True

    def block_ports(self, ports: str, how: Literal["drop", "reject"] = "drop") -> None:
        """Let this host's firewall drop or refuse TCP to a port, or to a range: "32768-60999"."""
        self.is_touched = True
        hook = "{ type filter hook input priority 0; }"
        verdict = "drop" if how == "drop" else "reject with tcp reset"
        for rule in (
            "add table inet firewall",
            f"add chain inet firewall input {hook}",
            # Connections that this host opens go on.
            "add rule inet firewall input ct state established accept",
            f"add rule inet firewall input iifname eth0 tcp dport {ports} {verdict}",
        ):
            call([*self.namespace.enter("net"), "nft", rule])

    def fill_disk(self) -> None:
        """Leave no byte free on the disk, which holds the home and /tmp."""
        self.is_touched = True
        with (self.path(f"{self.folder}/disk/filler")).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _free_bytes(file.fileno()))

    def free_disk(self) -> None:
        """Take back what `fill_disk` has done."""
        self.path(f"{self.folder}/disk/filler").unlink()

    def refuse_keys(self) -> None:
        """Let nobody in by ssh."""
        self.is_touched = True
        self.path(".ssh/authorized_keys").write_text("")

    def hide(self, path: str) -> None:
        """Let a folder look empty in this host: a package that is not installed there."""
        self.is_touched = True
        self.run(["mount", "-n", "-t", "tmpfs", "-o", "ro", "hidden", path])

    def repair(self) -> None:
        """Make a host that is off as it was at first, before it boots again."""
        self.environment = {}
        self.name_itself(self.address)

    def name_itself(self, address: str) -> None:
        """Let this host resolve its own name to `address`: 127.0.1.1 is Debian's habit."""
        self.is_touched = address != self.address
        names = {**self._names, self.name: address}
        lines = [
            "127.0.0.1 localhost",
            "::1 localhost",
            *(f"{ip} {name}" for name, ip in names.items()),
        ]
        # Written in place: the host has this very file mounted as its /etc/hosts.
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def sent_bytes(self) -> int:
        """Return the bytes that went out of this host's card, headers included."""
        return switch.transferred_bytes(self.namespace, "tx")

    def received_bytes(self) -> int:
        """Return the bytes that came in at this host's card, headers included."""
        return switch.transferred_bytes(self.namespace, "rx")

    def _stop_all(self) -> bool:
        """Stop what runs; true if that was nothing: a process may just be forking another."""
        running = [pid for pid in self.pids() if _state(pid) not in ("T", "Z", "X", "")]
        for pid in running:
            os.kill(pid, signal.SIGSTOP)
        return not running


def _state(pid: int) -> str:
    """Return the state of a process as a letter (proc(5)), "" if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _free_bytes(descriptor: int) -> int:
    disk = os.fstatvfs(descriptor)
    return disk.f_bavail * disk.f_frsize
