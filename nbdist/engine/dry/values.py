"""Which numbers are equal on all ranks, where no number is known.

Each storage has a value: a hash of the operation that has written it, and of the values that this
has read. The same on two ranks: the same numbers. Random numbers follow from the seed and how many
were drawn, the result of an all_reduce, a broadcast or an all_gather from its number in the group.
What comes from outside of torch, such as a file, is taken for equal.

The idea is value numbering, as compilers do it (Alpern, Wegman and Zadeck, "Detecting equality of
variables in programs", POPL 1988).
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nbdist.engine.dry.live_bytes import storages


class Values:
    """The values of this rank's tensors.

    Attributes:
        with_number: Mixed into what is written: the value of a number that an operation is given.
    """

    def __init__(self, rank: int) -> None:
        self._by_storage: dict[int, int] = {}
        self._seed: object = ("rank", rank)
        self._drawn = 0
        self.with_number: object = None

    def seed(self, seed: object) -> None:
        """Begin the random numbers anew, as `torch.manual_seed` does."""
        self._seed, self._drawn = seed, 0

    def random(self) -> int:
        """Return the value of what is drawn next."""
        self._drawn += 1
        return hash((str(self._seed), self._drawn))

    def of(self, tensor: Tensor) -> int:
        """Return the value of a tensor."""
        parts = [
            (self._by_storage.get(one._cdata, 0), tuple(tensor.shape)) for one in storages([tensor])
        ]
        offset = tensor.storage_offset() if len(parts) == 1 else 0
        return hash((tuple(parts), offset))

    def write(self, tensors: Iterable[Any], value: int) -> None:
        """Note what tensors hold now; where one is a part of its storage, the rest stays."""
        for tensor in (one for one in tensors if isinstance(one, Tensor)):
            for storage in storages([tensor]):
                key, new = storage._cdata, hash((value, tuple(tensor.shape)))
                is_part = tensor.numel() * tensor.element_size() < storage.nbytes()
                old = self._by_storage.get(key, 0)
                self._by_storage[key] = hash((old, new)) if is_part else new

    def computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what an operation has written."""
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        leaves = tree_leaves((args, kwargs))
        read = [one for one in leaves if isinstance(one, Tensor)]
        given = kwargs or {}
        marked = [args[at] if at < len(args) else given.get(name) for at, name in _writes(func)]
        written = tree_leaves(marked)
        there = {storage._cdata for storage in storages(read)}
        new = [one for one in made if any(s._cdata not in there for s in storages([one]))]
        if not new and not written:
            return  # a view
        key: list[Any] = [str(func), self.with_number]
        if torch.Tag.nondeterministic_seeded in func.tags:
            key.append(self._drawn_from(leaves))
        key += [self.of(one) if isinstance(one, Tensor) else _plain(one) for one in leaves]
        value = hash(tuple(key))
        self.write([*new, *written], value)

    def _drawn_from(self, leaves: list[Any]) -> object:
        own = next((one for one in leaves if isinstance(one, torch.Generator)), None)
        if own is None:
            return self.random()
        self._drawn += 1
        return own.initial_seed(), self._drawn


@functools.cache
def _writes(func: Any) -> list[tuple[int, str]]:
    """Return places and names of arguments that an operation writes. A schema is slow to ask."""
    every = enumerate(func._schema.arguments)
    return [(at, one.name) for at, one in every if one.alias_info and one.alias_info.is_write]


def _plain(one: Any) -> object:
    return "" if isinstance(one, torch.Generator) else repr(one)
