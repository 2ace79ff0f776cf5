"""Which layouts are alive on this rank, and what is told of them.

A layout lives as long as its model: the model holds it, and the return value may be dropped.
"""

import torch.distributed as dist

from nbdist.engine.compat import torch_sharded
from nbdist.engine.data import shards
from nbdist.engine.data.batches import Shard
from nbdist.engine.layout.layout import Layout, living


def facts_of(known: Layout) -> dict[str, str]:
    """Return what a run tells of its layout."""
    return {
        "layout": known.name,
        "model": torch_sharded.plain_name(known.model),
        "parameters": str(known.size.parameters),
        "layout_explained": repr(known.explain()),
    }


def live_layouts() -> list[Layout]:
    """Return the layouts whose models are alive, in the order in which they were made."""
    return sorted(living, key=lambda layout: layout.number)


def _data_shard() -> Shard | None:
    """Return which part of every batch is this rank's, as the newest living layout says."""
    newest = max(living, key=lambda layout: layout.number, default=None)
    if newest is None or newest.shape.world_size != dist.get_world_size():
        return None  # the group has another size since: whoever scaled it tells what follows
    return Shard(*newest.shape.data_part(dist.get_rank()))


shards.shard_as(_data_shard)
