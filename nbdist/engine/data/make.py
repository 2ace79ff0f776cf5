"""Make a loader: `nbdist.loader`. Main thread."""

import gc
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from nbdist.engine.data import resume
from nbdist.engine.data.loaders import Loader
from nbdist.engine.data.position import Standing
from nbdist.engine.data.sampler import Batches
from nbdist.engine.data.shards import by_rank, data_shard
from nbdist.errors import UsageError

# Options of torch's DataLoader that say how batches are made: ours to say.
_BY_ITSELF = "the order follows from seed and epoch, and each rank takes its part by itself"
_OURS = {
    "batch_size": "global_batch is the size over all ranks; a rank's part follows from it",
    "sampler": _BY_ITSELF,
    "batch_sampler": _BY_ITSELF,
}


def loader(
    dataset: Any,
    *,
    global_batch: int,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    weights: Sequence[float] | str | None = None,
    **options: Any,
) -> Loader[Any]:
    """Return a DataLoader over this rank's parts of global batches of `dataset`.

    Every sample comes exactly once an epoch on exactly one rank. Parts of a batch differ by at most
    one sample: `layout.step` weighs by it, and a plain loop, which averages ranks, may do so by
    `loader.share`. The epoch counts by itself; the order follows from (seed, epoch). `state_dict`
    and `load_state_dict` resume exactly, in the middle of an epoch and on another number of ranks
    too.

    Args:
        dataset: Anything with a length and items by index.
        global_batch: Samples in a batch over all ranks together.
        shuffle: A new order each epoch; False keeps the dataset's order.
        seed: Decides the order, and with epoch and rank the seeds of workers.
        drop_last: Leave out a last batch that is not full.
        weights: One number a rank (of those that share a batch), such as `[1, 0.5]` where rank 1
            is half as fast: parts are proportional to it, a sample each at least. Gradients must
            be weighed then, by `layout.step` or by `loader.share`. "measured" takes the ranks'
            own pace in their last 50 steps, whatever they trained; it is agreed anew when a loop
            begins, which all ranks must do together then. Parts are equal until it is known, and
            where ranks differ by less than a tenth. None shares equally.
        options: The other options of `torch.utils.data.DataLoader`.

    Raises:
        UsageError: A dataset without length or index, fewer samples than ranks, weights that do
            not fit, or an option that says how batches are made.
    """
    for name, why in _OURS.items():
        if name in options:
            raise UsageError(
                f"nbdist.loader takes no {name}.", why=why, do="leave it out; give global_batch"
            )
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise UsageError(
            f"nbdist.loader needs a dataset with a length and items by index, and "
            f"{type(dataset).__name__} has none.",
            why="a stream cannot be cut so that every sample comes once, in a known order",
            do="make it a list or a map-style Dataset, or give the stream to torch's DataLoader",
        )
    if dist.is_initialized() and data_shard() != by_rank():
        gc.collect()  # a layout that only a reference cycle keeps says nothing of what comes
    ranks, samples = data_shard().count, len(dataset)
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < ranks:
        raise UsageError(
            f"global_batch={global_batch!r} gives {ranks} ranks nothing to share.",
            why="it counts the samples of a batch over all ranks, and each needs at least one",
            do=f"use a whole number of {ranks} or more, best a multiple of {ranks}",
        )
    if samples < ranks or (drop_last and samples < global_batch):
        raise UsageError(
            f"The dataset has {samples} samples: too few for {ranks} ranks and a global batch of "
            f"{global_batch}.",
            do="use more samples, fewer ranks, or a smaller batch",
        )
    standing = Standing(
        Batches(samples, global_batch, shuffle, seed, drop_last), resume.cell_number()
    )
    made = Loader(dataset, standing, options)
    made.weights = weights
    resume.add(standing)
    return made
