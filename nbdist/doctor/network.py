"""Loopback, ports and interfaces, and settings in the environment that fight with ranks."""

import os
import socket
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from nbdist.doctor.findings import Finding

LOOPBACK_TIMEOUT_S = 2.0
_PORTS_OF_A_CLUSTER = 16 + 64  # ipyparallel's, and gloo's of as many ranks as one would have

_INTERFACE_SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# Set by nbdist on every rank, whatever stands there: its recovery needs them so.
_OVERRULED = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_DIST_USE_NCCL2",
)
_HARMFUL = {
    "TORCH_NCCL_BLOCKING_WAIT": "a waiting rank cannot be released",
    "NCCL_BLOCKING_WAIT": "a waiting rank cannot be released",
    "CUDA_LAUNCH_BLOCKING": "every kernel launch waits, so steps are slow and times misleading",
    "NCCL_P2P_DISABLE": "GPUs of this machine exchange through its memory, which is slow",
    "NCCL_SHM_DISABLE": "GPUs of this machine exchange through sockets, which is slow",
}
_OFF = ("", "0", "false", "False")


def examine() -> list[Finding]:
    """Return all findings about the network and what is set of it."""
    interfaces = look_at_interfaces()
    environment = dict(os.environ)
    return [
        judge_loopback(look_at_loopback()),
        judge_ports(look_at_ports(_PORTS_OF_A_CLUSTER)),
        judge_interfaces(interfaces),
        *judge_settings(environment, list(interfaces)),
        judge_proxies(environment),
    ]


def look_at_loopback() -> str:
    """Send a byte through 127.0.0.1; return what went wrong, empty when it arrived."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), LOOPBACK_TIMEOUT_S) as client,
        ):
            server.settimeout(LOOPBACK_TIMEOUT_S)
            peer, _ = server.accept()
            with peer:
                peer.settimeout(LOOPBACK_TIMEOUT_S)
                client.sendall(b"x")
                return "" if peer.recv(1) == b"x" else "nothing arrived"
    except OSError as error:
        return str(error)


def judge_loopback(error: str) -> Finding:
    """Judge the loopback interface, on which notebook and ranks of one machine talk."""
    if error:
        fix = "ip link set lo up    (as root; a firewall must let 127.0.0.1 talk to itself)"
        return Finding("loopback", f"127.0.0.1 does not answer: {error}", True, fix)
    return Finding("loopback", "127.0.0.1 answers")


def look_at_ports(count: int) -> str:
    """Take `count` ports of loopback at once; return what went wrong, empty when all were had."""
    taken = []
    try:
        for _ in range(count):
            taken.append(socket.create_server(("127.0.0.1", 0)))
    except OSError as error:
        return f"{len(taken)} of {count}: {error}"
    finally:
        for server in taken:
            server.close()
    return ""


def judge_ports(error: str) -> Finding:
    """Judge whether a cluster finds free ports."""
    if not error:
        return Finding("ports", "free ports available")
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        between = f" (of {'-'.join(text)})"
    except OSError:
        between = ""
    fix = "ss -tan | wc -l shows how many are in use; ulimit -n, how many files may be open"
    return Finding("ports", f"too few free ports{between}: {error}", True, fix)


def look_at_interfaces() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each network interface."""
    import psutil

    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


def judge_interfaces(interfaces: Mapping[str, Sequence[str]]) -> Finding:
    """Judge the network interfaces; `%dist start --interface` takes one of them."""
    names = [f"{name} {addresses[0]}" for name, addresses in interfaces.items() if addresses]
    if not any(a.startswith("127.") for addresses in interfaces.values() for a in addresses):
        fix = "ip addr add 127.0.0.1/8 dev lo    (as root)"
        return Finding("interfaces", "none has 127.0.0.1", True, fix)
    return Finding("interfaces", ", ".join(names))


def judge_settings(environment: Mapping[str, str], interfaces: Sequence[str]) -> list[Finding]:
    """Judge settings of gloo, NCCL and torch that ranks would inherit; what is well is one line."""
    found = []
    for name in _INTERFACE_SETTINGS:
        wanted = environment.get(name, "").lstrip("=^").split(",")[0].partition(":")[0]
        # NCCL takes the beginning of a name as well.
        if wanted and not any(interface.startswith(wanted) for interface in interfaces):
            says = f"names {wanted}, which is not an interface of this machine"
            found.append(Finding(name, says, True, f"unset {name}, and restart Jupyter"))
    for name, harm in _HARMFUL.items():
        if environment.get(name, "") not in _OFF:
            fix = f"unset {name}, and restart Jupyter"
            found.append(Finding(name, f"{environment[name]}: {harm}", True, fix))
    for name in _OVERRULED:
        if name in environment:
            found.append(Finding(name, f"{environment[name]}, which nbdist overrides on its ranks"))
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        says = "DETAIL: each collective is checked by one more, so steps are slow"
        fix = "unset TORCH_DISTRIBUTED_DEBUG: nbdist compares collectives anyway"
        found.append(Finding("TORCH_DISTRIBUTED_DEBUG", says, True, fix))
    return found or [Finding("settings", "no gloo, NCCL or torch variable causes problems")]


def judge_proxies(environment: Mapping[str, str]) -> Finding:
    """Judge whether what is asked of this machine would be sent to a proxy."""
    proxies = {
        name.lower().removesuffix("_proxy"): value
        for name, value in environment.items()
        if name.lower().endswith("_proxy") and value
    }
    if not proxies.keys() & {"http", "all"}:
        return Finding("proxies", "none for this machine")
    if urllib.request.proxy_bypass_environment("127.0.0.1", proxies):  # type: ignore[attr-defined]
        return Finding("proxies", "not used for this machine")
    says = "what is asked of 127.0.0.1 goes to a proxy, so MLflow's UI is not found"
    return Finding("proxies", says, True, "export no_proxy=localhost,127.0.0.1")
