"""What torch's DataLoader is given as its dataset where nbdist reads or transforms samples.

It runs where batches are made: in the loader's workers, else in the rank. A batch of a source is a
dict of tensors by column, made whole; with a transform or a collate function of the user's it is
samples, one dict each, as of any other dataset.

Transforms draw random numbers that follow from (seed, epoch, sample) alone: the same on any number
of ranks and workers, and after a resume.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from nbdist.engine.data import generators, making
from nbdist.engine.data.batches import Seeds
from nbdist.engine.data.order.sampler import Seeded
from nbdist.engine.data.order.stream_batches import Samples
from nbdist.engine.data.reading import columns
from nbdist.engine.data.reading.reader import RowBlock
from nbdist.engine.data.sources.source import Columns

Transform = Callable[[Any], Any]


class Rows(Dataset[Any]):
    """A source's samples, as far as a DataLoader asks: it is given them instead of indices."""

    def __init__(self, samples: int, transform: Transform | None, is_by_sample: bool) -> None:
        """Make batches.

        Args:
            samples: How many the source has.
            transform: Of one sample.
            is_by_sample: Return samples, for a function that collates them, and not tensors.
        """
        self.samples = samples
        self._transform, self._is_by_sample = transform, is_by_sample

    def __len__(self) -> int:
        return self.samples

    def __getitems__(self, block: RowBlock) -> Any:
        """Return what is collated: tensors by column, or a list of samples."""
        if self._transform is None and not self._is_by_sample:
            return tensors(block.columns)
        samples = as_samples(block.columns)
        if self._transform is None:
            return samples
        return transformed(self._transform, samples, block.ids.tolist(), block.seed)


class OfStream(Dataset[Any]):
    """A stream's samples, as far as a DataLoader asks: it is given them instead of indices."""

    def __init__(self, transform: Transform | None) -> None:
        self._transform = transform

    def __getitems__(self, given: Samples) -> list[Any]:
        """Return the samples of a batch, transformed."""
        if self._transform is None:
            return given.samples
        return transformed(self._transform, given.samples, given.ids, given.seed)


class Transformed(Dataset[Any]):
    """A dataset with items by index, and a transform of each of them."""

    def __init__(self, dataset: Any, transform: Transform) -> None:
        self.dataset, self._transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._transform(self.dataset[index])

    def __getitems__(self, indices: Seeded) -> list[Any]:
        """Return the samples of a batch, transformed."""
        several = getattr(self.dataset, "__getitems__", None)
        samples = several(list(indices)) if several else map(self.dataset.__getitem__, indices)
        return transformed(self._transform, samples, indices, indices.seed)

    def origin_of(self, index: int) -> str:
        """Return where a sample lies, if the dataset knows."""
        ask = getattr(self.dataset, "origin_of", None)
        return str(ask(index)) if callable(ask) else ""


def as_is(batch: Any) -> Any:
    """Stand for a collate function where a batch is made already."""
    return batch


def transformed(transform: Transform, samples: Any, ids: Sequence[int], seed: Seeds) -> list[Any]:
    """Return samples transformed, each with random numbers of its own."""
    samples = list(samples)  # what a dataset's items take is not the transform's time
    with generators.kept(), making.here.part("transform"):
        made = []
        for sample, number in zip(samples, ids, strict=True):
            generators.seed_all(seed.of_sample(number))
            made.append(transform(sample))
        return made


def as_samples(read: Columns) -> list[dict[str, Any]]:
    """Return one dict a sample: numbers as numpy has them, else Python values."""
    lists = [
        column if isinstance(column, np.ndarray | list) else column.to_pylist()
        for column in read.values()
    ]
    return [dict(zip(read, row, strict=True)) for row in zip(*lists, strict=True)]


def tensors(read: Columns) -> dict[str, Any]:
    """Return a batch by column: a tensor where all samples have one shape, else a list."""
    return {name: _tensor(column) for name, column in read.items()}


def _tensor(column: Any) -> Any:
    if isinstance(column, np.ndarray):
        return torch.from_numpy(column)
    if isinstance(column, list):
        return _of_list(column)
    numbers = columns.numbers_of_lists(column)
    if numbers is None:
        return column.to_pylist()
    flat, lengths = numbers
    if (lengths == lengths[0]).all():
        return torch.from_numpy(flat.reshape(len(lengths), int(lengths[0])))
    return list(torch.from_numpy(flat).split(lengths.tolist()))


def _of_list(column: list[Any]) -> Any:
    """Return what is no array as it is; arrays as one tensor, or one each where they differ."""
    if not all(isinstance(one, np.ndarray) for one in column):
        return column
    if len({one.shape for one in column}) == 1:
        return torch.from_numpy(np.stack(column))
    return [torch.from_numpy(one.copy()) for one in column]
