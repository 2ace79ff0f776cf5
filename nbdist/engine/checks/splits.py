"""Report which part of a dataset a loop reads, and which of its samples this rank is given.

A split that is drawn without a seed is another one on each rank, whose numbers differ on purpose.
What is compared, where ranks share its samples out, is the length of the `Subset` and some of its
indices. Main thread.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from torch.utils.data import DistributedSampler, Subset

from nbdist.engine.compat import torch_hooks
from nbdist.engine.data.order import sampler

_INDICES = 64  # of one Subset
_DEEPEST = 8  # datasets around one another
_INNER = ("dataset", "_dataset", "subset")  # as those that transform call the one they are around


def split_of(iterator: Any) -> dict[str, float]:
    """Return `split`, a number of a DataLoader's part, equal for equal ones; nothing without one.

    Nor where a rank reads what it has chosen for itself: that is to differ.
    """
    if not sampler.is_shared_out(iterator):
        return {}
    parts = [_part(subset) for subset in _subsets(torch_hooks.dataset_of(iterator))]
    if not parts:
        return {}
    digest = blake2b(repr(parts).encode(), digest_size=6).digest()
    return {"split": float(int.from_bytes(digest, "little"))}


def replicas_of(iterator: Any) -> dict[str, float]:
    """Return among how many replicas a DistributedSampler shares samples out, and whose it gives.

    Nothing of any other sampler: those of nbdist ask the layout.
    """
    found = torch_hooks.sampler_of(iterator)
    if not isinstance(found, DistributedSampler):
        return {}
    return {"replicas": float(found.num_replicas), "replica": float(found.rank)}


def _subsets(dataset: Any) -> Iterator[Subset[Any]]:
    for _ in range(_DEEPEST):
        if isinstance(dataset, Subset):
            yield dataset
        held = vars(dataset) if hasattr(dataset, "__dict__") else {}
        dataset = next((held[name] for name in _INNER if name in held), None)


def _part(subset: Subset[Any]) -> tuple[int, list[int]]:
    length = len(subset.indices)
    places = range(0, length, max(1, length // _INDICES))
    return length, [int(subset.indices[place]) for place in places[:_INDICES]]
