"""Let the ranks meet when a generation begins, and exchange texts without a collective.

Through the store: waits end at an abort and at a timeout. Main thread only.
"""

import logging
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.compat.groups.group_spec import GroupSpec
from nbdist.engine.compat.groups.torch_groups import PrefixStore
from nbdist.engine.group import shared_memory, state
from nbdist.engine.group.plan import GroupPlan, Hello, Key, make_plan
from nbdist.engine.group.shared_memory import Offered
from nbdist.engine.group.state import GroupState
from nbdist.engine.tap import collective_check, counters
from nbdist.engine.tap.collective_check_store import StoreTable
from nbdist.shared.errors import ClusterError
from nbdist.shared.text import name_ranks

log = logging.getLogger(__name__)

# The longest that ranks wait for each other while they form the group: one of them may import torch
# from a cold disk, or copy all it holds. The notebook frees them at once where a rank has failed or
# ended, and where none progresses (`client/cluster/patience.py`); torchrun ends them.
FORM_TIMEOUT_S = 600.0


def exchange(topic: str, text: str, timeout_s: float) -> dict[int, str]:
    """Send a text to all ranks and return each rank's text. All ranks, main thread.

    Through the store, so that it needs no collective, and ends in time.

    Args:
        topic: Names the exchange; used once in a generation.
        text: This rank's text.
        timeout_s: Longest wait for the other ranks.

    Raises:
        ClusterError: A rank did not send its text in time.
        ReleasedError: `abort` was called meanwhile.
    """
    here = state.here.member()
    store = PrefixStore(f"nbdist/{here.generation}/{topic}", here.store)
    store.set(str(here.rank), text)
    ranks = range(here.world_size)
    try:
        store.wait([str(rank) for rank in ranks], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [rank for rank in ranks if not store.check([str(rank)])]
        raise ClusterError(
            f"The process group was not formed: {name_ranks(missing)} did not arrive.",
            why=f"rank {here.rank} waited {timeout_s:g} s for generation {here.generation}.",
            do="%dist restart",
        ) from error
    texts = store.multi_get([str(rank) for rank in ranks])
    return {rank: bytes(text).decode() for rank, text in zip(ranks, texts, strict=True)}


def meet(
    here: GroupState,
    groups: Mapping[Key, GroupSpec],
    timeout_s: float,
    *,
    default: str,
    is_new: bool = False,
) -> GroupPlan:
    """Exchange hellos with the other ranks, and return the plan made from them."""
    here.offered = _share(here)
    offer = None if here.offered is None else here.offered.offer
    count = torch_groups.group_count()
    hello = Hello(here.address, groups, count, is_new, default, offer, here.host)
    texts = exchange("hello", hello.to_json(), timeout_s)
    hellos = {rank: Hello.from_json(text) for rank, text in texts.items()}
    here.peers = {rank: said.address for rank, said in hellos.items() if rank != here.rank}
    counters.begin_generation(_announcements(here, hellos), here.generation)
    return make_plan(hellos)


def _announcements(
    here: GroupState, hellos: Mapping[int, Hello]
) -> collective_check.SharedTable | StoreTable | None:
    """Return the table in which this generation's collectives are announced."""
    if here.check == "store":
        limit = timedelta(seconds=here.timeout_s)
        return StoreTable(here.store, here.rank, here.generation, limit)
    neighbours = [rank for rank, said in hellos.items() if said.host == hellos[here.rank].host]
    offer = hellos[min(neighbours)].memory  # of the host's first rank
    memory = None if offer is None else shared_memory.accept(offer)
    if memory is None:
        return None
    return collective_check.SharedTable(memory, here.rank, here.world_size)


def _share(here: GroupState) -> Offered | None:
    """Allocate memory for announcements, on a host's first rank; None if that fails."""
    if not here.leads or here.world_size == 1 or here.check != "shared":
        return None
    if here.offered is not None:
        here.offered.close()
    try:
        return Offered(collective_check.size_bytes(here.world_size))
    except OSError as error:
        log.warning("Collectives are not compared between ranks: %s", error)
        return None


def stop_sharing(here: GroupState) -> None:
    """Stop offering a host's memory, when the groups have been formed.

    gloo's ranks have mapped it by then. NCCL's meet later: there it is kept until
    the next generation.
    """
    if here.offered is not None and "gloo" in here.backend:
        here.offered.close()
        here.offered = None
