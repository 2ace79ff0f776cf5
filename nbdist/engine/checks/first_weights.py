"""Whether ranks cut the same weights into shards: `fully_shard` takes each rank's own for granted.

A shard has no like on another rank. So each parameter's fingerprint is taken before it is cut, and
counts as long as the shard is what was cut then: weights that were loaded since are others.

Main thread.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nbdist.engine.checks.fingerprints import as_float, fingerprints
from nbdist.engine.compat import torch_wrappers

# Where a shard keeps the fingerprints of the whole and of itself, as they were then. Beside the
# parameters they would need weak references, with which torch cannot swap a tensor (`model.to`).
_KEY = "_nbdist_begun"


def look_on() -> None:
    """Look at what `fully_shard` cuts from here on."""
    torch_wrappers.around_sharding(_before_cut)


def weights_of(parameters: Sequence[Tensor]) -> float | None:
    """Return a number for the weights that these shards were cut from, the same where they were.

    None where it is not known of all, or they have changed since.
    """
    known: list[Any] = [getattr(parameter, _KEY, None) for parameter in parameters]
    shards = [_shard(parameter) for parameter in parameters]
    if not known or any(one is None for one in known):
        return None
    now = fingerprints(shards)
    if not torch.equal(now, torch.stack([shard for _, shard in known])):
        return None
    return as_float(int(torch.stack([whole for whole, _ in known]).sum()))


def _before_cut(parameter: Tensor) -> torch_wrappers.Sharded | None:
    # Of a tensor of another kind, such as a quantised one, nobody knows how its bits are read.
    is_plain = type(parameter) in (Tensor, nn.Parameter) and not parameter.is_meta
    if not is_plain or not parameter.numel() or dist.get_world_size() == 1:
        return None
    (whole,) = fingerprints([parameter])

    def note(sharded: nn.Parameter) -> None:
        (shard,) = fingerprints([_shard(sharded)])
        setattr(sharded, _KEY, (whole, shard))

    return note


def _shard(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
