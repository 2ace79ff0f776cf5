"""One collective many times over loopback, and the bytes that the kernel has counted there.

Run as `python -m tests.group.wire_bytes RANKS KIND` in a network namespace of its own, so that
nothing else passes its loopback. Prints bytes that a rank sent for one call, the mean of the ranks.
TCP's headers and acknowledgements are taken off: loopback's largest packets have 64 kB, so they are
below 0.2 %; what remains of them is in the figure.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

CASES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
MEGABYTES = 24
CALLS = 5


def _calls(kind: str) -> tuple[int, int]:
    """Return bytes on the loopback for all ranks' calls, and what the tap counted of this rank."""
    import torch
    import torch.distributed as dist

    from nbdist.engine.tap import tap

    tap.install("full")
    rank, n = dist.get_rank(), dist.get_world_size()
    count = MEGABYTES * 1_000_000 // n // 4
    x, whole = torch.ones(count), torch.ones(count * n)
    actions: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, whole),
        "broadcast": lambda: dist.broadcast(x, src=0),
        "all_to_all": lambda: dist.all_to_all_single(x[: count // n * n], x[: count // n * n] + 1),
        "send": lambda: dist.send(x, dst=1) if rank == 0 else rank == 1 and dist.recv(x, src=0),
    }
    actions[kind]()
    dist.barrier()
    before = _loopback_bytes()
    tap.take()
    for _ in range(CALLS):
        actions[kind]()
    counted = tap.take().bytes
    dist.barrier()
    return _loopback_bytes() - before, counted


def _loopback_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counted,) = [line.split(":")[1].split() for line in lines if line.strip().startswith("lo:")]
    return int(counted[8])  # sent


def main(n: int, kind: str) -> None:
    """Print the bytes sent for one call of one rank, and what the tap counted of rank 0."""
    from tests.group.harness import run_ranks

    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    found = run_ranks(n, _calls, kind)
    print(max(wire for wire, _ in found) / CALLS / n, found[0][1] // CALLS)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
