"""Run ranks in a network namespace of their own, where what one of them sends is shaped by tc.

`unshare -rn python -m tests.group.shaped RANKS SHAPED_RANK BITS_PER_S` prints what the ranks tell
of their links, as JSON. It is another way to a slow link than ours: the kernel's queueing.
"""

import json
import subprocess
import sys

from tests.group import link_ranks
from tests.group.engines import cluster


def tc(arguments: str) -> None:
    subprocess.run(["tc", *arguments.split()], check=True, stderr=subprocess.DEVNULL)


def main(n: int, rank: int, bits_per_s: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with cluster(n) as ranks:
        tc("qdisc add dev lo root handle 1: htb default 1")
        tc("class add dev lo parent 1: classid 1:1 htb rate 100gbit quantum 200000")
        tc(f"class add dev lo parent 1: classid 1:2 htb rate {bits_per_s} burst 128k cburst 128k")
        for port in ranks.run(link_ranks.ports)[rank]:
            match = f"match ip sport {port} 0xffff"
            tc(f"filter add dev lo parent 1: protocol ip prio 1 u32 {match} flowid 1:2")
        print(json.dumps(ranks.run(link_ranks.records_of, 90, 1)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
