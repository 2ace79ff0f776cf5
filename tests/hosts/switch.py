"""The switch between test hosts: a bridge in a network namespace of its own, with faults."""

import json
from pathlib import Path

from tests.hosts.commands import call
from tests.hosts.namespaces import Namespace


class Switch:
    """A bridge to which hosts are plugged in, each at a port that bears its name."""

    def __init__(self, folder: Path) -> None:
        with (folder / "switch.log").open("ab") as log:
            self.namespace = Namespace(["net"], ["sleep", "infinity"], log)
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
        # The kernel does so itself, a moment after the last process of a host is gone.
        call([*self.namespace.enter(), "ip", "link", "delete", _port(name)], check=False)

    def set_port(self, name: str, *, up: bool) -> None:
        """Connect or disconnect a host's cable."""
        self._run("ip", "link", "set", _port(name), "up" if up else "down")

    def drop(self, *, sender: str | None = None, receiver: str | None = None) -> None:
        """Lose every packet from one host, to one host, or between two: nobody is told."""
        match = [*_match("iifname", sender), *_match("oifname", receiver)]
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


def _match(key: str, name: str | None) -> list[str]:
    return [key, f'"{_port(name)}"'] if name else []


def _port(name: str) -> str:
    return f"to-{name}"
