"""Private parts of torch: a ZeroRedundancyOptimizer that sends what it may have changed, only.

torch's sends all of its parameters after each step, frozen ones (the base of an adapter) with them.
One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`.
Imported where one is made: it brings in RPC and the compiler of scripts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import optim

from nbdist.engine.compat.lacking import lacking


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    needed = ["_broadcast_params_from_rank", "_partition_parameters"]
    broken = lacking(optim.ZeroRedundancyOptimizer, needed, "ZeroRedundancyOptimizer")
    return [f"torch {torch.__version__}: {what}" for what in broken]


class ZeroRedundancyOptimizer(optim.ZeroRedundancyOptimizer):
    """torch's, that leaves out parameters which are frozen and have no gradient."""

    def _broadcast_params_from_rank(self, rank: int) -> list[Any]:
        """Send the parameters of one rank's part, all ranks the same ones; return the handles."""
        own: Any = self
        group = own.process_group
        source = dist.get_global_rank(group, rank)
        part = [p for each in own._partition_parameters()[rank] for p in each["params"]]
        changed = [p for p in part if p.requires_grad or p.grad is not None]
        return [dist.broadcast(p.data, source, group, async_op=True) for p in changed]
