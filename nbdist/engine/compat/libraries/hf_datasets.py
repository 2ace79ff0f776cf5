"""What Hugging Face's datasets do not tell in public: how a stream is split, and shuffled.

Nothing is imported here: a dataset that is given has come from `datasets`, which is imported then.
`check()` says what a new release has moved. Tried with datasets 5.2.
"""

import copy
import sys
from collections.abc import Iterator
from typing import Any


def check() -> list[str]:
    """Return what `datasets`, where it is imported, lacks of what we use; else nothing."""
    module = sys.modules.get("datasets.iterable_dataset")
    if module is None:
        return []
    import datasets

    stream = datasets.Dataset.from_dict({"id": [0]}).to_iterable_dataset()
    private = ("_distributed", "_epoch", "_ex_iterable")
    missing = [name for name in private if not hasattr(stream, name)]
    broken = [f"datasets.IterableDataset.{name} is gone" for name in missing]
    if not hasattr(module, "BufferShuffledExamplesIterable"):
        broken.append("datasets.iterable_dataset.BufferShuffledExamplesIterable is gone")
    elif not missing and not loses_buffer(stream.shuffle(seed=0)):
        broken.append("a shuffled datasets.IterableDataset is not told from others any more")
    return broken


def is_stream(dataset: Any) -> bool:
    """Return whether this is a `datasets.IterableDataset`."""
    module = sys.modules.get("datasets.iterable_dataset")
    return module is not None and isinstance(dataset, module.IterableDataset)


def whole(dataset: Any) -> Any:
    """Return a stream as it was before `split_dataset_by_node`; anything else as it is.

    A node's part of a stream would be shared out once more, and is another on another number of
    ranks: a state of one of 2 nodes, loaded on one of 4, gives wrong samples without an error.
    """
    if not is_stream(dataset):
        return dataset
    copied = object.__new__(type(dataset))  # `copy.copy` would share all that is set on it
    # What it is told here, as the epoch, no other loop over it hears.
    copied.__dict__.update(
        {**vars(dataset), "_distributed": None, "_epoch": copy.deepcopy(dataset._epoch)}
    )
    return copied


def loses_buffer(dataset: Any) -> bool:
    """Return whether the stream has a shuffle buffer, whose samples its state leaves out."""
    if not is_stream(dataset):
        return False
    buffered: Any = sys.modules["datasets.iterable_dataset"].BufferShuffledExamplesIterable
    return any(isinstance(one, buffered) for one in _chain(dataset._ex_iterable))


def _chain(iterable: Any) -> Iterator[Any]:
    """Return an iterable of examples, and those that it is made of."""
    yield iterable
    for name in ("ex_iterable", "ex_iterables"):
        inner = getattr(iterable, name, None)
        for one in inner if isinstance(inner, list) else [inner] if inner is not None else []:
            yield from _chain(one)
