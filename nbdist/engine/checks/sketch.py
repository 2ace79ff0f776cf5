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
_LARGEST: Final = 2**52  # of the whole numbers that a float holds exactly
_ROW: Final = BUCKETS * 2048  # numbers whose signs are drawn; each further row has one for all


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums, and behind them a fingerprint: (BUCKETS + 1,) of float64.

    On the tensor's device; of a DTensor for this rank's part.
    """
    local = local_part(tensor.detach())
    flat = (local._values() if local.is_sparse else local).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = fingerprints([flat]) if len(flat) else flat.new_zeros(1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.to(torch.float32 if flat.is_floating_point() else torch.float64)
    signs = _signs(_ROW, flat.device).to(flat.dtype)
    rows, left = divmod(len(flat), _ROW)
    sums = signs.new_zeros(BUCKETS, dtype=torch.float64)
    if rows:
        each = _signs(rows, flat.device).to(flat.dtype)
        sums += ((each @ flat[: rows * _ROW].view(rows, _ROW)) * signs).view(-1, BUCKETS).sum(0)
    if left:
        last = torch.nn.functional.pad(flat[rows * _ROW :] * signs[:left], (0, -left % BUCKETS))
        sums += last.view(-1, BUCKETS).sum(0)
    return torch.cat([sums, (bits % _LARGEST).to(torch.float64)])


@lru_cache(maxsize=32)
def _signs(count: int, device: torch.device) -> torch.Tensor:
    random = torch.Generator().manual_seed(count)
    signs = torch.randint(0, 2, (count,), generator=random)
    return (2 * signs - 1).to(device, torch.float32)
