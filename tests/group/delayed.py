"""Run ranks in a network namespace of their own, where what one of them sends arrives late.

`unshare -rn python -m tests.group.delayed RANKS DELAYED_RANK SECONDS` prints what the ranks tell of
their links, as JSON. Its packets take a detour: out of a tun device, into a thread that holds them
back, and in again by the same device. So it needs no netem, which many kernels lack.
"""

import fcntl
import json
import os
import queue
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.group import link_ranks
from tests.group.engines import cluster

DEVICE = "detour"
TABLE = 7
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def open_detour() -> int:
    """Make the device; return its file. Packets that come out of it may be for this host."""
    ip("link set lo up")
    tun = os.open("/dev/net/tun", os.O_RDWR)
    name = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(tun, _TUNSETIFF, name)
    ip(f"link set {DEVICE} mtu 65000 up")
    settings = Path("/proc/sys/net/ipv4/conf")
    (settings / "all/rp_filter").write_text("0")
    for name_of, value in (("rp_filter", "0"), ("accept_local", "1"), ("route_localnet", "1")):
        (settings / DEVICE / name_of).write_text(value)
    ip(f"route add default dev {DEVICE} table {TABLE}")
    # The table of local addresses is asked first; let rules come before it.
    ip("rule add pref 100 lookup local")
    ip("rule del pref 0")
    return tun


def hold_back(tun: int, delay_s: float) -> None:
    """Send each packet on so much later, in order, on two threads."""
    held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def take() -> None:
        while True:
            held.put((time.monotonic() + delay_s, os.read(tun, 1 << 17)))

    def give() -> None:
        while True:
            due, packet = held.get()
            time.sleep(max(0.0, due - time.monotonic()))
            os.write(tun, packet)

    for work in (take, give):
        threading.Thread(target=work, daemon=True).start()


def main(n: int, rank: int, delay_s: float) -> None:
    tun = open_detour()
    with cluster(n) as ranks:
        hold_back(tun, delay_s)
        for port in ranks.run(link_ranks.ports)[rank]:
            ip(f"rule add pref 10 iif lo ipproto tcp sport {port} lookup {TABLE}")
        print(json.dumps(ranks.run(link_ranks.records_of, 90, 1)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
