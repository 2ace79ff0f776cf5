"""Measure latency and bandwidth between ranks, one pair after another, in the training's own group.

The model is that of Hockney (1994): a message of n bytes takes latency + n / bandwidth. Latency is
half of the fastest of several round trips of a few bytes. Bandwidth is the slope between two long
messages, whose sizes grow until the longer one takes long enough to be timed: what both have in
common, such as the latency or the burst that a limited link lets through, falls out.

Main thread, on all ranks, as a cell runs. Pairs take turns, so that none shares its link with
another.
"""

import time
from typing import Any, Final

import torch
import torch.distributed as dist

_PINGS: Final = 20
_SHORT: Final = 8  # bytes
_FIRST: Final = 256 * 1024
_LONGEST: Final = 64 * 1024 * 1024
_LONG_ENOUGH_S: Final = 0.02
_MANY_WINDOWS: Final = 10  # latencies: TCP has opened its window by then
_TOO_LONG_S: Final = 0.5  # to send four times as much once more
_LONG_ONES: Final = 3  # of each size, the fastest counts


def measure(pairs: list[list[int]], names: dict[str, Any]) -> list[list[float]]:
    """Return [latency in s, bandwidth in bytes/s] of the pairs in which this rank is the first.

    Args:
        pairs: Of ranks, the same list on all; each waits for its turn.
        names: The namespace of the rank's cells.
    """
    rank, device = dist.get_rank(), names["device"]
    found = []
    for first, second in pairs:
        if rank == first:
            found.append(_ask(second, device))
        elif rank == second:
            _answer(first, device)
        dist.barrier()
    return found


def _ask(peer: int, device: torch.device) -> list[float]:
    short = torch.zeros(_SHORT, dtype=torch.uint8, device=device)
    latency_s = min(_round_trip(short, short, peer) for _ in range(_PINGS)) / 2
    long_enough_s = max(_LONG_ENOUGH_S, _MANY_WINDOWS * latency_s)
    size, before, before_s = _FIRST, 0, 2 * latency_s
    while True:
        long = torch.zeros(size, dtype=torch.uint8, device=device)
        _round_trip(long, short, peer)  # the first one opens buffers and windows
        seconds = min(_round_trip(long, short, peer) for _ in range(_LONG_ONES))
        is_timed = before > 0 and seconds >= long_enough_s
        is_last = is_timed or seconds >= _TOO_LONG_S or size >= _LONGEST
        _tell(peer, is_last=is_last, device=device)
        if is_last:
            return [latency_s, (size - before) / max(seconds - before_s, 1e-9)]
        size, before, before_s = size * 4, size, seconds


def _answer(peer: int, device: torch.device) -> None:
    short = torch.zeros(_SHORT, dtype=torch.uint8, device=device)
    for _ in range(_PINGS):
        _return(short, short, peer)
    size = _FIRST
    is_last = False
    while not is_last:
        long = torch.zeros(size, dtype=torch.uint8, device=device)
        for _ in range(1 + _LONG_ONES):
            _return(long, short, peer)
        is_last = _hear(peer, device)
        size *= 4


def _round_trip(there: torch.Tensor, back: torch.Tensor, peer: int) -> float:
    began = time.perf_counter()
    dist.send(there, peer)
    dist.recv(back, peer)
    if back.is_cuda:
        torch.cuda.synchronize(back.device)
    return time.perf_counter() - began


def _return(there: torch.Tensor, back: torch.Tensor, peer: int) -> None:
    dist.recv(there, peer)
    dist.send(back, peer)


def _tell(peer: int, *, is_last: bool, device: torch.device) -> None:
    dist.send(torch.tensor([is_last], dtype=torch.uint8, device=device), peer)


def _hear(peer: int, device: torch.device) -> bool:
    said = torch.zeros(1, dtype=torch.uint8, device=device)
    dist.recv(said, peer)
    return bool(said.item())
