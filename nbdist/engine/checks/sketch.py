"""Sum a tensor up in a few numbers from which the distance of two tensors can be told.

Numbers are added into `BUCKETS` sums with random signs, the same in every process. The distance of
two such sums is that of the tensors, within a fifth as a rule: a count sketch, as in M. Charikar,
K. Chen and M. Farach-Colton, "Finding frequent items in data streams" (2002). No sample can be read
out of it. Whether two tensors are equal to the bit, a fingerprint tells beside.
"""

from functools import lru_cache
from typing import Final

import torch

from nbdist.engine.checks.fingerprints import fingerprints
from nbdist.engine.compat.torch_hooks import local_part

BUCKETS: Final = 16
_SIGNS: Final = 1 << 20  # that are drawn; each part of a tensor has them from another on
_APART: Final = 16 * 7919  # as memory is aligned, so that products are fast
_DIGITS: Final = 52  # bits that a float holds exactly


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums, and behind them a fingerprint: (BUCKETS + 1,) of float64.

    On the tensor's device; of a DTensor for this rank's part.
    """
    local = local_part(tensor.detach())
    flat = (local._values() if local.is_sparse else local).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = fingerprints([flat]) if len(flat) else flat.new_zeros(1, dtype=torch.int64)
    bits = (bits ^ bits >> _DIGITS) & ((1 << _DIGITS) - 1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.to(torch.float32 if flat.is_floating_point() else torch.float64)
    sums = [_sum(part, number) for number, part in enumerate(flat.tensor_split(BUCKETS))]
    return torch.cat([torch.stack(sums).to(torch.float64), bits.to(torch.float64)])


def _sum(part: torch.Tensor, number: int) -> torch.Tensor:
    signs = _signs(part.device, part.dtype)
    total = part.new_zeros(())
    for at, some in enumerate(part.split(_SIGNS)):
        first = (number + at * BUCKETS) * _APART % _SIGNS
        total = total + torch.dot(some, signs[first : first + len(some)])
    return total


@lru_cache(maxsize=8)
def _signs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randint(0, 2, (_SIGNS,), generator=torch.Generator().manual_seed(0))
    return (2 * drawn - 1).to(device, dtype).repeat(2)
