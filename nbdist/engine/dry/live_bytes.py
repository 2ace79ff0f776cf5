"""The bytes of all tensors that are alive, operation by operation."""

import functools
import math
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from nbdist.engine.compat import torch_dry


class LiveBytes(TorchDispatchMode):
    """Follows each storage from the operation that makes it to its end. Within `following`.

    Args:
        granule: Of what an allocator gives, in bytes: 512 of CUDA's.
        copied: Collectives, by their operators' names, that a backend makes on a copy of what a
            rank puts in.

    Attributes:
        now: Bytes that are alive.
        peak: The most that were, since `restart`.
        gathered: The most bytes of storages that collectives read or write, since then.
    """

    def __init__(self, granule: int = 1, copied: Collection[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._granule = granule
        self._copied = copied
        self._sizes: dict[int, int] = {}  # by the address of a storage
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._in_collectives: set[int] = set()
        self.now = 0
        self._sent_now = 0
        self.restart()

    def restart(self) -> None:
        """Begin anew with peaks."""
        self.peak, self.gathered = self.now, self._sent_now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out an operation, and count what it makes."""
        if torch_dry.is_of_parts(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.count(func, args, kwargs, result)
        return result

    def count(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Count what an operation has made."""
        self.add(tree_leaves(result))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._mark(tree_leaves((args, kwargs, result)))
            if func.overloadpacket.__name__ in self._copied:
                most = max((one.nbytes() for one in storages(tree_leaves(args))), default=0)
                self.peak = max(self.peak, self.now + most)

    def add(self, leaves: Iterable[Any]) -> None:
        """Count tensors, each storage once."""
        for storage in storages(leaves):
            self._follow(storage)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._ends[key] = weakref.ref(storage, functools.partial(self._end, key))
        self._set(key, math.ceil(storage.nbytes() / self._granule) * self._granule)

    def _set(self, key: int, size: int) -> None:
        change = size - self._sizes[key]
        self._sizes[key] = size
        self.now += change
        self.peak = max(self.peak, self.now)
        if key in self._in_collectives:
            self._sent_now += change
            self.gathered = max(self.gathered, self._sent_now)

    def _end(self, key: int, _ended: object) -> None:
        self._set(key, 0)
        self._in_collectives.discard(key)
        del self._sizes[key], self._ends[key]

    def _mark(self, leaves: Iterable[Any]) -> None:
        for storage in storages(leaves):
            key = storage._cdata
            if key in self._sizes and key not in self._in_collectives:
                self._in_collectives.add(key)
                self._sent_now += self._sizes[key]
                self.gathered = max(self.gathered, self._sent_now)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            self._follow(storage)
            self._in_collectives.add(storage._cdata)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow all operations of this thread within the block."""
        with self.resizing(), self:
            yield

    def resizing(self) -> AbstractContextManager[None]:
        """Follow storages that are resized within the block."""
        return torch_dry.resizes(self._resized)


def storages(leaves: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once; of a DTensor that of its local part."""
    found: dict[int, torch.UntypedStorage] = {}
    for leaf in leaves:
        for part in _plain_parts(leaf) if isinstance(leaf, Tensor) else ():
            storage = part.untyped_storage()
            found[storage._cdata] = storage
    return list(found.values())


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    if torch_dry.is_meta(tensor):
        return []  # of a copy that never has memory
    if torch_dry.is_plain(tensor) or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    held = [getattr(tensor, name) for name in names]
    return [part for one in held if isinstance(one, Tensor) for part in _plain_parts(one)]
