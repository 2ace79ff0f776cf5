"""What runs on the ranks of test_links.py."""

import statistics
import time
from typing import Any

COUNT = 250_000  # float32: a megabyte


def all_reduce_ms(times: int, group_name: str = "") -> float:
    """Return the median time of all_reduces of a megabyte."""
    import torch
    import torch.distributed as dist

    group = _groups.get(group_name)
    tensor = torch.zeros(COUNT)
    took = []
    for _ in range(times):
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)


_groups: dict[str, Any] = {}


def make_group(name: str, size: int) -> None:
    import torch.distributed as dist

    _groups[name] = dist.new_group(list(range(size)))


def emulate(bytes_per_s: float | None, rank: int) -> None:
    import torch.distributed as dist

    import nbdist

    if dist.get_rank() == rank:
        nbdist.emulate_link(bytes_per_s)


def refusal(bytes_per_s: object) -> str:
    import nbdist

    try:
        nbdist.emulate_link(bytes_per_s)
    except nbdist.UsageError as error:
        return str(error)
    return ""


def connections() -> list[tuple[tuple[str, int], int | None]]:
    from nbdist.engine.group import sockets, state

    here = state.here.member()
    return [(pair.caller, pair.peer) for pair in sockets.pairs(here.address, here.peers)]


def ports() -> list[int]:
    """Return this rank's ends of its connections."""
    from nbdist.engine.group import sockets, state

    here = state.here.member()
    pairs = sockets.pairs(here.address, here.peers)
    ports = {pair.use(lambda s: s.getsockname()[1]) for pair in pairs}
    return sorted(port for port in ports if port is not None)


def counts() -> dict[str, tuple[int, int]]:
    """Return the bytes (sent, received) by connection."""
    from nbdist.engine.group import sockets, state
    from nbdist.engine.group.links import tcp_info

    here = state.here.member()
    found = {}
    for pair in sockets.pairs(here.address, here.peers):
        read = pair.use(tcp_info.read)
        assert read is not None
        found[f"{pair.caller[0]}:{pair.caller[1]}"] = (read.sent_bytes, read.received_bytes)
    return found


def received_by_all_reduces(times: int) -> int:
    """Return what `nbdist.received_bytes` counts of so many all_reduces of a megabyte."""
    import torch
    import torch.distributed as dist

    import nbdist

    dist.barrier()
    before = nbdist.received_bytes()
    dist.barrier()  # nobody begins before all have looked
    for _ in range(times):
        dist.all_reduce(torch.zeros(COUNT))
    received = nbdist.received_bytes() - before
    dist.barrier()  # nobody sends what follows before all have looked
    return received


def records_of(steps: int, a_step: int) -> list[tuple[int, dict[str, float]]]:
    """Make steps of so many all_reduces each; return what a rank tells of its links."""
    import torch
    import torch.distributed as dist

    from nbdist.engine.group.links import link_stats

    link_stats.INTERVAL_S = 0.1
    told: list[tuple[int, dict[str, float]]] = []
    step = 0
    sampled = link_stats.LinkStats(lambda: step, lambda at, values: told.append((at, values)))
    tensor = torch.zeros(COUNT)
    for step in range(1, steps + 1):  # noqa: B007 - `sampled` reads it
        for _ in range(a_step):
            dist.all_reduce(tensor)
        sampled.sample()
    return told


def starved_s() -> float:
    """Return for how long this thread has been ready to run and had no core."""
    with open("/proc/thread-self/schedstat") as told:
        return int(told.read().split()[1]) / 1e9


def sample_ms(times: int) -> float:
    """Return the median time of a sample."""
    from nbdist.engine.group.links import link_stats

    link_stats.INTERVAL_S, link_stats.MOST_COST = 0.0, float("inf")
    step = 0
    sampled = link_stats.LinkStats(lambda: step, lambda at, values: None)
    took = []
    for step in range(10, 10 * times, 10):  # noqa: B007
        began = time.perf_counter()
        sampled.sample()
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)
