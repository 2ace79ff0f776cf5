"""Time messages between ranks, one pair after another, and all_reduces of all of them.

They go through the training's own group, in sizes that grow until one takes long enough to be
timed. Of each size the fastest of several counts: what else a machine does makes it slower only.

Main thread, on all ranks, as a cell runs. Pairs take turns, so that none shares its link with
another.
"""

import time
from typing import Any, Final

import torch
import torch.distributed as dist

_PINGS: Final = 20
_SIZES: Final = (8, 4096, *(64 * 1024 * 4**i for i in range(6)))  # bytes, 64 MiB the most
_LONG_ENOUGH_S: Final = 0.01
_MANY_WINDOWS: Final = 10  # latencies: TCP has opened its window by then
_TOO_LONG_S: Final = 0.5  # to send four times as much once more
_LONG: Final = 4  # times the shortest: such messages tell of the bandwidth
_FEWEST: Final = 3  # of them
_SHORT: Final = 256 * 1024  # bytes: up to here more of them are sent
_TIMES: Final = (10, 3)  # short and long ones; the fastest counts

Points = list[tuple[int, float]]  # bytes, seconds


def measure(pairs: list[list[int]], names: dict[str, Any]) -> dict[str, Any]:
    """Return the points of the pairs in which this rank is the first, and those of all_reduces.

    Args:
        pairs: Of ranks, the first of which sends; the same list on all, each waits for its turn.
        names: The namespace of the rank's cells.
    """
    rank, device = dist.get_rank(), names["device"]
    found: list[Points] = []
    for first, second in pairs:
        if rank == first:
            found.append(_ask(second, device))
        elif rank == second:
            _answer(first, device)
        dist.barrier()
    return {"pairs": found, "all_reduce": _reduce_all(device)}


def _ask(peer: int, device: torch.device) -> Points:
    """Return bytes, and seconds in one direction: each message is answered by a short one."""
    short = torch.zeros(_SIZES[0], dtype=torch.uint8, device=device)
    trips = [(_SIZES[0], min(_round_trip(short, short, peer) for _ in range(_PINGS)))]
    for size in _SIZES[1:]:
        long = torch.zeros(size, dtype=torch.uint8, device=device)
        _round_trip(long, short, peer)  # the first one opens buffers and windows
        trips.append((size, min(_round_trip(long, short, peer) for _ in range(_times(size)))))
        is_last = _is_enough(trips)
        _tell(peer, is_last=is_last, device=device)
        if is_last:
            break
    back_s = min(seconds for _, seconds in trips) / 2  # no trip is shorter than two short messages
    return [(size, seconds - back_s) for size, seconds in trips]


def _answer(peer: int, device: torch.device) -> None:
    short = torch.zeros(_SIZES[0], dtype=torch.uint8, device=device)
    for _ in range(_PINGS):
        _return(short, short, peer)
    for size in _SIZES[1:]:
        long = torch.zeros(size, dtype=torch.uint8, device=device)
        for _ in range(1 + _times(size)):
            _return(long, short, peer)
        if _hear(peer, device):
            break


def _reduce_all(device: torch.device) -> Points:
    """Return bytes, and seconds until the last rank has the sum."""
    points: Points = []
    for size in _SIZES:
        tensor = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(1 + _times(size)):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            _wait(device)
            times.append(time.perf_counter() - began)
        slowest = torch.tensor(times[1:], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        points.append((size, slowest.min().item()))
        if _is_enough(points):  # all ranks have the same points
            break
    return points


def _times(size: int) -> int:
    return _TIMES[size > _SHORT]


def _is_enough(points: Points) -> bool:
    shortest_s, seconds = points[0][1], points[-1][1]
    long_enough_s = max(_LONG_ENOUGH_S, _MANY_WINDOWS * shortest_s)
    is_line = sum(each > _LONG * shortest_s for _, each in points) >= _FEWEST
    is_timed = is_line and seconds >= long_enough_s
    return is_timed or seconds >= _TOO_LONG_S or points[-1][0] == _SIZES[-1]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _round_trip(there: torch.Tensor, back: torch.Tensor, peer: int) -> float:
    began = time.perf_counter()
    dist.send(there, peer)
    dist.recv(back, peer)
    _wait(back.device)
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
