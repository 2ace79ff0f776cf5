"""One collective many times between ranks of one host, and the bytes that TCP carried for it."""

import os
import socket
import stat
import struct
from contextlib import closing, suppress
from typing import Any, NamedTuple

CASES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
MEGABYTES = 24
CALLS = 5

_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received of `struct tcp_info`, linux/tcp.h


def all_cases() -> dict[str, tuple[int, int]]:
    """Return by kind the bytes this rank received in `CALLS` calls, and those the tap counted."""
    import torch
    import torch.distributed as dist

    from nbdist.engine.tap import tap

    tap.install("full")
    rank, n = dist.get_rank(), dist.get_world_size()
    count = MEGABYTES * 1_000_000 // n // 4
    x, whole = torch.ones(count), torch.ones(count * n)
    even = x[: count // n * n]
    actions: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, whole),
        "broadcast": lambda: dist.broadcast(x, src=0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(even), even),
        "send": lambda: dist.send(x, dst=1) if rank == 0 else rank == 1 and dist.recv(x, src=0),
    }
    return {kind: _measured(actions[kind]) for kind in CASES}


def _measured(action: Any) -> tuple[int, int]:
    import torch.distributed as dist

    from nbdist.engine.tap import tap

    action()  # makes the connections
    dist.barrier()
    before = received_bytes()
    dist.barrier()  # nobody begins before all have looked
    tap.take()
    for _ in range(CALLS):
        action()
    counted = tap.take().bytes
    received = received_bytes() - before
    dist.barrier()  # nobody sends what follows before all have looked
    return received, counted


class Ways(NamedTuple):
    """A layout, and policies as calls in the words of the interface."""

    layout: str
    policies: tuple[str, ...] = ()


WAYS = [
    *map(Ways, ("ddp", "zero1", "zero2", "zero3", "hsdp", "tp=4", "fsdp=2 tp=2", "dp=2 tp=2")),
    Ways("tp=4", ("TensorParallel(sequence=True)",)),
    Ways("cp=4", ('ContextParallel("gather")',)),
    Ways("cp=4", ('ContextParallel("ulysses")',)),
    Ways("dp=2 cp=2", ('ContextParallel("gather")',)),
    *(
        Ways(layout, ("Pipeline(microbatches=4)",))
        for layout in ("pp=4", "pp=2 dp=2", "pp=2 fsdp=2")
    ),
    Ways("pp=2 cp=2", ("Pipeline(microbatches=4)", 'ContextParallel("gather")')),
    Ways("pp=2 cp=2", ("Pipeline(microbatches=4)", 'ContextParallel("ulysses")')),
    Ways("pp=4", ("Pipeline(microbatches=4)", "ActivationCheckpoint()", 'Precision("fp16")')),
    Ways("pp=2 dp=2", ("Pipeline(microbatches=4)", 'Precision("bf16", reduce="bf16")')),
    Ways("pp=2 fsdp=2", ("Pipeline(microbatches=4)", 'Precision("bf16")')),
]


def layouts(ways: list[Ways]) -> list[tuple[float, float, str]]:
    """Return by way the bytes this rank received in a step, those that `explain` tells, and it."""
    return [_of_layout(way) for way in ways]


def _of_layout(way: Ways) -> tuple[float, float, str]:
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    import nbdist
    from nbdist.engine.data.order.shards import data_shard
    from tests.group import wide_model

    policies = [
        eval(text, {name: getattr(nbdist, name) for name in dir(nbdist)}) for text in way.policies
    ]
    torch.manual_seed(0)
    layout = nbdist.parallelize(wide_model.GPT(), way.layout, *policies)
    optimizer = layout.optimizer(torch.optim.SGD, lr=0.1)
    x, y = (t.chunk(data_shard().count)[data_shard().index] for t in wide_model.batch())

    def step() -> None:
        layout.step(x, y, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()  # makes the connections; DDP's buckets are laid anew in the second
    dist.barrier()
    before = received_bytes()
    dist.barrier()
    for _ in range(CALLS):
        step()
    received = (received_bytes() - before) / CALLS
    dist.barrier()
    explained = layout.explain(batch=x)
    return received, explained.sent_bytes, repr(explained)


def received_bytes() -> int:
    """Return the payload that this process's TCP connections have received, as Linux counts it.

    Not what the loopback carries: when a receiver is late to acknowledge, on a busy machine, Linux
    probes by sending the last 64 kB again, and a dozen such probes were over 1 % of 120 MB.
    """
    return sum(_received_by(int(name)) for name in os.listdir("/proc/self/fd"))


def _received_by(number: int) -> int:
    with suppress(OSError):  # the directory's own descriptor is in the list and closed by now
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            with closing(socket.socket(fileno=os.dup(number))) as s:
                if s.type == socket.SOCK_STREAM and s.family in (socket.AF_INET, socket.AF_INET6):
                    told = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 240)
                    return int(_RECEIVED.unpack_from(told)[0])
    return 0
