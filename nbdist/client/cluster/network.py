"""Where a cluster listens, and who may talk to it there: loopback, unless a person asks otherwise.

What each socket asks of its caller:

| socket | loopback | elsewhere |
| --- | --- | --- |
| ipyparallel's (cells, requests, output) | a signature (HMAC-SHA256) | a signature, inside CURVE |
| the store, gloo, NCCL | nothing | nothing: hence `--trust-network` |

Pure, but for `look_at_interfaces` and `has_curve`.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from nbdist.shared.errors import StartError, UsageError
from nbdist.shared.options import is_loopback

_SIGNATURE = "hmac-sha256"
_LEAST_KEY_CHARS = 32


def look_at_interfaces() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each network interface of this machine."""
    import socket

    import psutil

    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


def has_curve() -> bool:
    """Return whether this pyzmq can encrypt."""
    import zmq

    return zmq.has("curve")


def choose_address(
    asked: str, interfaces: Mapping[str, Sequence[str]], *, trust_network: bool, has_curve: bool
) -> str:
    """Return the address to listen on.

    Args:
        asked: An IPv4 address of this machine, or the name of one of its interfaces.
        interfaces: What `look_at_interfaces` returned.
        trust_network: The person accepts that the store, gloo and NCCL authenticate no one.
        has_curve: This pyzmq can encrypt.

    Raises:
        StartError: Off loopback, and the network is not trusted, or there is no CURVE.
        UsageError: This machine has no such address.
    """
    address = _find(asked, interfaces)
    if is_loopback(address):
        return address
    require_trust(
        f"{address} can be reached from the network",
        f"on {address}",
        trust_network=trust_network,
        has_curve=has_curve,
        do=f"%dist start --interface {asked} --trust-network, if you trust everyone who can "
        "reach it; else drop --interface: ranks of one machine need no network.",
    )
    return address


def require_trust(
    what: str,
    where: str,
    *,
    trust_network: bool,
    has_curve: bool,
    do: str = "add --trust-network, if you trust everyone who can reach these hosts.",
) -> None:
    """Refuse to listen on the network without the person's word, or without encryption.

    Args:
        what: What is open to the network, as the beginning of a sentence.
        where: Which messages that concerns, such as `on 10.0.0.1`.
        trust_network: See `choose_address`.
        has_curve: See `choose_address`.
        do: What to do about it.

    Raises:
        StartError: The network is not trusted, or there is no CURVE.
    """
    if not trust_network:
        raise StartError(
            f"{what}, and torch does not authenticate.",
            why="nbdist's own messages would be signed and encrypted there. But torch's store, "
            "gloo and NCCL have no passwords and no encryption: whoever reaches their ports could "
            "read and change tensors, stop the training, and, where ranks exchange "
            "pickled objects, run code as you.",
            do=do,
        )
    if not has_curve:
        raise StartError(
            f"Messages {where} would not be encrypted, so nothing was started.",
            why="this pyzmq was built without CURVE (libsodium).",
            do="pip install --force-reinstall pyzmq brings a build that has it.",
        )


def _find(asked: str, interfaces: Mapping[str, Sequence[str]]) -> str:
    if interfaces.get(asked):
        return interfaces[asked][0]
    try:
        address = ipaddress.ip_address(asked)
    except ValueError:
        address = None
    if address is not None and address.is_unspecified:
        raise UsageError(
            f"interface takes one address, and {asked} means all of them: {_table(interfaces)}."
        )
    # All of 127.0.0.0/8 is this machine, though Linux lists the first of it only.
    mine = [entry for entries in interfaces.values() for entry in entries]
    if address is None or not (asked in mine or (address.version == 4 and address.is_loopback)):
        raise UsageError(
            f"interface is an IPv4 address or an interface of this machine, not {asked!r}: "
            f"{_table(interfaces)}."
        )
    return asked


def _table(interfaces: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} ({entries[0]})" for name, entries in interfaces.items() if entries)


def check_connection(facts: Mapping[str, Any], address: str) -> None:
    """Refuse a controller that does not protect its sockets as it was configured to.

    A config file of IPython's, in /etc or in this Python's folder, may say otherwise.

    Args:
        facts: What the controller wrote for its clients.
        address: Where it was configured to listen.

    Raises:
        StartError: Messages would not be signed, or not encrypted off loopback, or it listens
            elsewhere.
    """
    wrong = ""
    if len(facts.get("key") or "") < _LEAST_KEY_CHARS:
        wrong = "its messages have no key to be signed with"
    elif facts.get("signature_scheme") != _SIGNATURE:
        wrong = f"its messages are signed by {facts.get('signature_scheme')}, not {_SIGNATURE}"
    elif not is_loopback(address) and not facts.get("curve_serverkey"):
        wrong = f"its sockets on {address} do not use CURVE"
    elif facts.get("interface") != f"tcp://{address}":
        wrong = f"it listens on {facts.get('interface')}, not on {address} alone"
    if wrong:
        raise StartError(
            "ipyparallel's controller does not protect its sockets, so nothing was started.",
            why=f"{wrong}; a config file of IPython's has changed that.",
            do="look for ipcontroller_config.py and ipython_config.py in /etc/ipython, "
            "/usr/local/etc/ipython and etc/ipython of this Python.",
        )
