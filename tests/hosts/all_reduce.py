"""One rank of an all-reduce over gloo, as a script for a test host: nothing of nbdist in it.

Usage: all_reduce.py RANK WORLD_SIZE MASTER ELEMENTS. Waits for a line on stdin before the large
all-reduce and after it, and prints `ready`, then the sum: the test counts bytes in between.
"""

import os
import sys

import torch
import torch.distributed as dist

rank, world_size, master, elements = (
    int(sys.argv[1]),
    int(sys.argv[2]),
    sys.argv[3],
    int(sys.argv[4]),
)
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
dist.init_process_group("gloo", f"tcp://{master}:29500", rank=rank, world_size=world_size)
value = torch.full((elements,), float(rank + 1))
dist.barrier()
print("ready", flush=True)
sys.stdin.readline()
dist.all_reduce(value)
print(float(value[-1]), flush=True)
sys.stdin.readline()
dist.destroy_process_group()
