"""Check that ranks shard the same weights: `fully_shard` takes each rank's own for granted.

A shard has no copy on another rank. So each parameter's fingerprint is taken before it is cut, and
counts as long as the shard is unchanged: weights may be loaded later.

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

# The attribute of a shard with the fingerprints of the whole and of itself, at that time. Beside
# the parameters they would need weak references, with which torch cannot swap a tensor
# (`model.to`).
_KEY = "_nbdist_begun"


def look_on() -> None:
    """Record what `fully_shard` cuts from here on."""
    torch_wrappers.around_sharding(_before_cut)


def weights_of(parameters: Sequence[Tensor]) -> float | None:
    """Return a number for the weights that these shards were cut from; equal for equal weights.

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
    # The bits of another kind of tensor, such as a quantised one, have no known meaning.
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
