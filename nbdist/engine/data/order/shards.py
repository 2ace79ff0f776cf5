"""Which part of every batch is this rank's, and how large parts are to be by the ranks' pace.

Main thread.
"""

import torch
import torch.distributed as dist

from nbdist.engine.data import services
from nbdist.engine.data.batches import Shard
from nbdist.engine.data.order import weighting


def data_shard() -> Shard:
    """Return this rank's shard of the data: as the newest living layout says, else over all ranks.

    dp and fsdp cut batches; the ranks of one tp group get the same samples. Without a process group
    there is one shard.
    """
    if dist.is_available() and dist.is_initialized():
        return services.here.layout_shard() or by_rank()
    return Shard(0, 1)


def by_rank() -> Shard:
    """Return this rank's shard where each rank has one of its own."""
    return Shard(dist.get_rank(), dist.get_world_size())


def measured_weights() -> tuple[float, ...] | None:
    """Return the weights that all ranks' paces ask for, the same on each. Collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    shard = data_shard()
    has_gloo = "gloo" in str(dist.get_backend_config())
    mine = torch.tensor([shard.index, services.here.pace()], device="cpu" if has_gloo else "cuda")
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    paces = [(int(index), pace) for index, pace in (one.tolist() for one in everyone)]
    return weighting.from_paces(paces, shard.count)
