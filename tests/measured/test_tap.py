"""The times that the tap tells of waits, of what computing hides, and of queues."""

from __future__ import annotations

import time
from typing import Any

from tests.group.harness import run_ranks
from tests.group.test_tap import decoded, install_tap, rows_of


def _late_peer(delay_s: float) -> tuple[float, float]:
    """Rank 1 comes late to each of four collectives; return exposed and total ms."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    tap = install_tap("full")
    out, world = torch.empty(2), dist.group.WORLD
    assert world is not None
    _ = funcol.all_reduce(out, "sum", world) + 1  # the first call imports for 0.5 s
    exposed = total = 0.0
    for case in range(4):
        dist.barrier()
        tap.take()
        if dist.get_rank() == 1:
            time.sleep(delay_s)
        if case == 0:
            dist.all_reduce(out)
        elif case == 1:
            dist.all_reduce(out, async_op=True).wait()
        elif case == 2:
            dist.reduce_scatter_tensor(out, torch.ones(4), async_op=True).wait()
        else:
            _ = funcol.all_reduce(out, "sum", world) + 1
        traffic = tap.take()
        exposed += traffic.exposed_ns / 1e6
        total += traffic.total_ns / 1e6
    return exposed, total


def test_waiting_for_a_late_peer_is_exposed_on_the_rank_that_waits() -> None:
    (waited, total), (waited_late, total_late) = run_ranks(2, _late_peer, 0.1)
    assert waited > 4 * 95
    assert total > 4 * 95
    assert waited_late < waited / 2
    assert total_late < total / 2


def _hidden() -> tuple[float, float]:
    """Rank 0 computes while its collective waits for rank 1."""
    import torch
    import torch.distributed as dist

    tap = install_tap("full")
    dist.barrier()
    tap.take()
    if dist.get_rank() == 1:
        time.sleep(0.1)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    if dist.get_rank() == 0:
        time.sleep(0.3)  # stands for computing
    work.wait()
    traffic = tap.take()
    return traffic.exposed_ns / 1e6, traffic.total_ns / 1e6


def test_a_collective_behind_computation_is_total_and_not_exposed() -> None:
    exposed, total = run_ranks(2, _hidden)[0]
    assert total > 90
    assert exposed < 50


def _blocked() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(0.2)
    dist.all_reduce(torch.ones(2))
    work = dist.all_reduce(torch.ones(2), async_op=True)
    time.sleep(0.1)  # stands for computing
    work.wait()


def _wait_rows() -> list[int]:
    from nbdist.shared.packed import TICK_NS

    calls, _ = rows_of(_blocked)
    flat = calls.waits.tolist()
    return [(b - a) * TICK_NS for a, b in zip(flat[::2], flat[1::2], strict=True)]


def test_the_times_in_which_the_main_thread_was_blocked_are_told() -> None:
    first, _ = run_ranks(2, _wait_rows)
    assert first[0] > 190e6
    assert all(wait_ns < first[0] / 4 for wait_ns in first[1:])  # what was over is no wait


def _queueing() -> None:
    """Four operations on one worker, while the peer keeps the first waiting."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(0.2)
    works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(4)]
    for work in works:
        work.wait()


def _queue_rows() -> Any:
    return decoded(rows_of(_queueing)[0])


def test_what_lies_between_launch_and_begin_is_queueing_for_one_of_gloos_workers() -> None:
    rows = [row for row in run_ranks(2, _queue_rows)[0] if row[0].kind == "all_reduce"]
    ms = [((begin - launch) / 1e4, (end - begin) / 1e4) for _, _, launch, begin, end in rows]
    # gloo has two workers: two operations wait for the peer, two for a worker.
    assert all(queued < 50 and ran > 150 for queued, ran in ms[:2])
    assert all(queued > 150 and ran < 50 for queued, ran in ms[2:])
