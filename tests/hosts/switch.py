"""The switch between test hosts: a bridge in a network namespace of its own, with faults."""

import json
import subprocess
import sys
from pathlib import Path

from tests.hosts.commands import call, end
from tests.hosts.namespaces import Namespace


class Switch:
    """A bridge to which hosts are plugged in, each at a port that bears its name."""

    def __init__(self, folder: Path) -> None:
        with (folder / "switch.log").open("ab") as log:
            self.namespace = Namespace(["net"], ["sleep", "infinity"], log)
        self._folder = folder
        self._late: dict[str, subprocess.Popen[bytes]] = {}
        self._run("ip", "link", "set", "lo", "up")
        self._run("ip", "link", "add", "br0", "type", "bridge")
        self._run("ip", "link", "set", "br0", "up")

    def plug_in(self, name: str, host: Namespace, address: str) -> None:
        """Give `host` a network card, eth0, with this address, in a network of 254 hosts."""
        # A host keeps its hardware address over a reboot: the others remember it for a while.
        hardware = "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))
        self._run(
            *("ip", "link", "add", _port(name), "type", "veth", "peer", "name", "eth0"),
            *("address", hardware, "netns", str(host.pid)),
        )
        self._run("ip", "link", "set", _port(name), "master", "br0", "up")
        inside = host.enter("net")
        call([*inside, "ip", "addr", "add", f"{address}/24", "dev", "eth0"])
        call([*inside, "ip", "link", "set", "eth0", "up"])

    def unplug(self, name: str) -> None:
        """Remove the port; the other end, a host's card, goes with it."""
        if name in self._late:
            end(self._late.pop(name))
            self._run("ip", "link", "delete", _late_port(name))
        # The kernel does so itself, a moment after the last process of a host is gone.
        call([*self.namespace.enter(), "ip", "link", "delete", _port(name)], check=False)

    def set_port(self, name: str, *, up: bool) -> None:
        """Connect or disconnect a host's cable."""
        self._run("ip", "link", "set", _port(name), "up" if up else "down")

    def drop(self, *, sender: str | None = None, receiver: str | None = None) -> None:
        """Lose every packet from one host, to one host, or between two: nobody is told."""
        match = [*self._match("iifname", sender), *self._match("oifname", receiver)]
        assert match, "drop() needs a sender or a receiver"
        self._run("nft", "add table bridge faults")
        hook = "{ type filter hook forward priority 0; }"
        self._run("nft", f"add chain bridge faults forward {hook}")
        self._run("nft", f"add rule bridge faults forward {' '.join(match)} drop")

    def deliver_all(self) -> None:
        """Take back what `drop` has done."""
        self._run("nft", "add table bridge faults")  # deleting needs one
        self._run("nft", "delete table bridge faults")

    def shape(self, name: str, rate: str) -> None:
        """Send to a host no faster than `rate` ("100mbit")."""
        self._run(*limit_rate(_port(name), rate))

    def delay(self, name: str, delay_s: float) -> None:
        """Let all packets from and to a host be late; once per host and boot."""
        assert name not in self._late, f"the link of {name} has a delay already"
        port, outside = _port(name), f"out-{name}"
        self._run("ip", "link", "set", port, "nomaster")
        new = ["type", "veth", "peer", "name", outside]
        self._run("ip", "link", "add", _late_port(name), *new)
        self._run("ip", "link", "set", outside, "up")
        self._run("ip", "link", "set", _late_port(name), "master", "br0", "up")
        die_too = ["setpriv", "--pdeathsig", "KILL"]
        carry = [sys.executable, "-I", str(Path(__file__).with_name("delay.py"))]
        with (self._folder / "switch.log").open("ab") as log:
            process = subprocess.Popen(
                [*die_too, *self.namespace.enter(), *carry, port, outside, str(delay_s)],
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._late[name] = process
        assert process.stdout is not None
        with process.stdout as stdout:
            assert stdout.readline() == b"ready\n", (self._folder / "switch.log").read_text()

    def _match(self, key: str, name: str | None) -> list[str]:
        """Match the host's port on the bridge, which has no other name while the host is late."""
        if name is None:
            return []
        return [key, f'"{_late_port(name) if name in self._late else _port(name)}"']

    def _run(self, *command: str) -> None:
        call([*self.namespace.enter(), *command])


def limit_rate(device: str, rate: str) -> list[str]:
    """Return the command that gives a network card a rate, with a bucket of 128 kB."""
    bucket = ["tbf", "rate", rate, "burst", "128kb", "latency", "100ms"]
    return ["tc", "qdisc", "replace", "dev", device, "root", *bucket]


def transferred_bytes(host: Namespace, direction: str) -> int:
    """Return the bytes that a host's card has sent ("tx") or received ("rx") since it was made."""
    output = call([*host.enter("net"), "ip", "-json", "-stats", "link", "show", "eth0"]).stdout
    (card,) = json.loads(output)
    count: int = card["stats64"][direction]["bytes"]
    return count


def _port(name: str) -> str:
    return f"to-{name}"


def _late_port(name: str) -> str:
    return f"late-{name}"
