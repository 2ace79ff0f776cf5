"""Private parts of torch for a new rank: a ZeroRedundancyOptimizer with the new rank's own part.

One of the modules for torch's private parts, see `torch_groups.py`. Each rank has an optimizer of
its own inside, for the parameters that are its part. The new rank makes that one again, without
states: they come from a peer. No constructor is called, which would be counted. Tried with torch
2.13.0 (CPU): tests/cluster/test_peers.py.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from nbdist.engine.compat import torch_live
from nbdist.engine.compat.lacking import lacking
from nbdist.engine.recovery.clone.unpickler import afterwards

_Contents = tuple[dict[str, Any], type, dict[str, Any], list[dict[str, Any]]]


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    needed = ["_clear_cache", "_partition_parameters"]
    broken = lacking(ZeroRedundancyOptimizer, needed, "ZeroRedundancyOptimizer")
    return [f"torch {torch.__version__}: {what}" for what in broken]


def is_plain(optimizer: Any) -> bool:
    """Return whether a ZeroRedundancyOptimizer has no buckets, which this module cannot make."""
    return not (optimizer.parameters_as_bucket_view or optimizer._overlap_with_ddp)


def reduce(optimizer: Any) -> tuple[Any, ...]:
    """Reduce a ZeroRedundancyOptimizer to what all ranks have of it."""
    of_this_rank = ("optim", "rank", "global_rank", "_all_state_dicts")
    state = {name: value for name, value in vars(optimizer).items() if name not in of_this_rank}
    inner = optimizer.optim
    of_part = ("param_groups", "state")
    inside = {name: value for name, value in vars(inner).items() if name not in of_part}
    options = [
        {name: value for name, value in group.items() if name != "params"}
        for group in inner.param_groups
    ]
    contents = (state, type(inner), inside, options)
    return _make, (type(optimizer),), contents, None, None, _fill


def _make(kind: type[torch.optim.Optimizer]) -> Any:
    optimizer: Any = object.__new__(kind)
    # Before anything refers to the class's `step`: torch replaces it by one that runs hooks.
    optimizer._patch_step_function()
    torch_live.here.remember(torch.optim.Optimizer, optimizer)
    return optimizer


def _fill(optimizer: Any, contents: _Contents) -> None:
    state, kind, inside, options = contents
    vars(optimizer).update(state, _all_state_dicts=[])

    def finish() -> None:
        optimizer.rank = dist.get_rank(optimizer.process_group)
        optimizer.global_rank = dist.get_rank()
        optimizer._clear_cache()
        part = optimizer._partition_parameters()[optimizer.rank]
        inner = _make(kind)
        vars(inner).update(inside)
        inner.param_groups = [
            {**shown, "params": group["params"]} for shown, group in zip(options, part, strict=True)
        ]
        inner.state = defaultdict(dict)
        optimizer.optim = inner

    afterwards(finish)
