"""Where ranks are: on which host, at which address, and their number there. Pure.

Ranks of one host follow each other, so that the innermost axes of a mesh stay within a host.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from nbdist.shared.errors import StartError
from nbdist.shared.options import LOOPBACK, ONE_GPU_A_RANK, may_share_gpus
from nbdist.shared.text import counted

HERE = "localhost"  # the notebook's machine
TOKEN = "shared-with-hosts"  # a file beside the logs: a host that reads it shares the folder


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """A rank's place among the hosts, as `torchrun` numbers it.

    Attributes:
        host: Its host's name, as the person gave it.
        address: IPv4 address on which the rank listens.
        local_rank: Its number on the host, from 0, and that of its GPU there.
        local_size: Ranks on the host.
        node: The host's number, from 0.
        nodes: Hosts that have ranks.
        peer: The rank in whose memory this one keeps its state; None where there is no other.
        leads: It is the host's lowest rank, which makes what the ranks there share.
    """

    host: str = HERE
    address: str = LOOPBACK
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    peer: int | None = None
    leads: bool = True

    def to_wire(self) -> dict[str, Any]:
        """Return the plain values that `RankPlacement(**values)` takes."""
        return asdict(self)


def one_host(n: int, address: str) -> dict[int, RankPlacement]:
    """Return the places of `n` ranks of the notebook's machine."""
    return places(dict.fromkeys(range(n), HERE), {HERE: address})


def assign(
    ranks: Iterable[int], slots: Mapping[str, int], fixed: Mapping[int, str]
) -> dict[int, str]:
    """Return the host of each rank: where it is, else the first host with a free slot.

    Args:
        ranks: All ranks.
        slots: Ranks that each living host takes, in the order in which hosts are filled.
        fixed: Where ranks are or were. One whose host is gone gets another.

    Raises:
        LookupError: There are more ranks than slots; its arguments are the ranks without one.
    """
    wanted = sorted(ranks)
    placed = {rank: fixed[rank] for rank in wanted if fixed.get(rank) in slots}
    free = {
        host: count - sum(where == host for where in placed.values())
        for host, count in slots.items()
    }
    new = [rank for rank in wanted if rank not in placed]
    open_slots = [host for host, count in free.items() for _ in range(count)]
    if homeless := new[len(open_slots) :]:
        raise LookupError(*homeless)
    placed |= zip(new, open_slots, strict=False)
    return dict(sorted(placed.items()))


def places(hosts: Mapping[int, str], addresses: Mapping[str, str]) -> dict[int, RankPlacement]:
    """Return the place of each rank, of ranks by host and addresses by host.

    Hosts are numbered by their lowest rank.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in sorted(hosts.items()):
        by_host.setdefault(host, []).append(rank)
    return {
        rank: RankPlacement(
            host,
            addresses[host],
            number,
            len(there),
            node,
            len(by_host),
            peer_of(rank, hosts),
            leads=number == 0,
        )
        for node, (host, there) in enumerate(by_host.items())
        for number, rank in enumerate(there)
    }


def keep_numbers(
    found: Mapping[int, RankPlacement], before: Mapping[int, RankPlacement]
) -> dict[int, RankPlacement]:
    """Return the places, with the local ranks of those that stay on their host as they were.

    Their GPUs go by them. Who comes to a host gets the lowest numbers that are free there.
    """
    numbers = {
        rank: before[rank].local_rank
        for rank, place in found.items()
        if rank in before and before[rank].host == place.host
    }
    for rank, place in sorted(found.items()):
        if rank not in numbers:
            taken = {numbers[r] for r in numbers if found[r].host == place.host}
            numbers[rank] = next(number for number in count() if number not in taken)
    return {rank: replace(place, local_rank=numbers[rank]) for rank, place in found.items()}


def gpu_of(local_rank: int, gpus: int, backend: str, environ: Mapping[str, str]) -> int:
    """Return the number of a rank's GPU on its host; over gloo ranks may share one.

    Args:
        local_rank: The rank's number on its host.
        gpus: GPUs of the host.
        backend: As in `init_process_group`.
        environ: The rank's environment.

    Raises:
        StartError: The host has no GPU, or too few for nccl.
    """
    if not gpus:
        raise StartError("This host has no GPU that torch can use.", do="%dist start --device cpu")
    if local_rank >= gpus and not may_share_gpus(backend, environ):
        raise StartError(
            f"Rank {local_rank} of this host would share a GPU, for it has {counted(gpus, 'GPU')}.",
            why=ONE_GPU_A_RANK,
            do="start with as many ranks as GPUs, or with --backend gloo",
        )
    return local_rank % gpus


def peer_of(rank: int, hosts: Mapping[int, str]) -> int | None:
    """Return the rank in whose memory a rank keeps its state; None where there is no other.

    On another host where there are several, so that a host's loss takes no rank and its copy; ranks
    of one host spread over those that follow. Else the next rank.
    """
    there = [other for other in sorted(hosts) if hosts[other] == hosts[rank]]
    others = [other for other in sorted(hosts) if hosts[other] != hosts[rank]]
    if not others:
        return there[(there.index(rank) + 1) % len(there)] if len(there) > 1 else None
    after = sum(other < rank for other in others)  # the first of the hosts that follow
    return others[(after + there.index(rank)) % len(others)]
