"""Know the live objects of torch that a fault may leave half done, without a search of the heap.

A search takes 0.1 s for a million objects, twice what a re-form may take. So constructors are
watched, from `group.join` on, and objects remembered as long as they live.

Some of torch's schedulers, those that hold others among them, do not call their base class's
constructor. So of schedulers every class's own one is watched. Of optimizers that must not be: what
does not call it only looks like one, and steps another.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

T = TypeVar("T")

# Composable `replicate` makes a DistributedDataParallel as well. FSDP2 is not here: torch keeps a
# table of its modules (`torch_sharded`).
_WATCHED: tuple[type[Any], ...] = (
    DistributedDataParallel,
    FullyShardedDataParallel,
    torch.amp.GradScaler,
    torch.optim.Optimizer,
    LRScheduler,
)


def _do_nothing(_made: object) -> None:
    """Stand for whoever is told of new objects."""


class LiveObjects:
    """The living objects of the watched classes, as a process has made them."""

    def __init__(self) -> None:
        # A dictionary keeps the order of making, which is the same on all ranks; a set would not.
        # The value is the object's number, in the order of making of all.
        self._live: dict[type[Any], WeakKeyDictionary[Any, int]] = {
            kind: WeakKeyDictionary() for kind in _WATCHED
        }
        self._numbers = itertools.count(1)
        self._newest = 0
        self._tell: Callable[[Any], None] = _do_nothing
        self._listeners: dict[str, Callable[[Any], None]] = {}
        self._is_looking = True

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Remember nothing that is made within the block, and tell nobody. Main thread."""
        was, self._is_looking = self._is_looking, False
        try:
            yield
        finally:
            self._is_looking = was

    def watch(self, tell: Callable[[Any], None] = _do_nothing) -> None:
        """Remember every object of the watched classes made from here on.

        Args:
            tell: Called with each as its constructor ends, and not with what `remember` counts in.
        """
        self._tell = tell
        for kind in _WATCHED:
            self._watch(kind, kind)
            if kind is LRScheduler:
                self._watch_below(kind)

    def listen(self, name: str, tell: Callable[[Any], None]) -> None:
        """Call `tell`, too, in the place of an earlier one of this name; it must not raise."""
        self._listeners[name] = tell

    def remember(self, kind: type[T], made: T) -> None:
        """Count in an object of a watched class that was made past its constructor."""
        self._newest = self._live[kind][made] = next(self._numbers)

    def forget(self, gone: Any) -> None:
        """Count an object out: no recovery has to do with it any more."""
        for known in self._live.values():
            known.pop(gone, None)

    def live(self, kind: type[T]) -> list[T]:
        """Return the living objects of a watched class, in the order of making."""
        # Faster than the dictionary's own iterator, which is asked at each step.
        references = self._live[kind].keyrefs()
        return [made for reference in references if (made := reference()) is not None]

    def newest_number(self) -> int:
        """Return the number of the watched object that was made last; 0 before the first."""
        return self._newest

    def number_of(self, kind: type[T], made: T) -> int:
        """Return an object's number: larger than of all made before it. 0: not watched."""
        return self._live[kind].get(made, 0)

    def _watch(self, kind: type[Any], own: type[Any]) -> None:
        """Watch the constructor of a watched class, or that of a class below it."""
        native = kind.__init__ if own is kind else vars(own).get("__init__")
        if native is None or getattr(native, "_nbdist_watches", False):
            return

        @functools.wraps(native)
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
            native(made, *args, **kwargs)
            if self._is_looking and made not in self._live[kind]:  # else its base class's has
                self.remember(kind, made)
                self._tell(made)
                for tell in self._listeners.values():
                    tell(made)

        __init__._nbdist_watches = True  # type: ignore[attr-defined]
        own.__init__ = __init__

    def _watch_below(self, kind: type[Any]) -> None:
        """Watch the constructors of all classes below one, and of those to come, as a cell's."""
        for own in _below(kind):
            self._watch(kind, own)

        def watch_too(cls: type[Any], /, **keywords: Any) -> None:
            super(kind, cls).__init_subclass__(**keywords)
            self._watch(kind, cls)

        kind.__init_subclass__ = classmethod(watch_too)  # type: ignore[assignment]


def _below(kind: type[Any]) -> Iterator[type[Any]]:
    for own in kind.__subclasses__():
        yield own
        yield from _below(own)


here = LiveObjects()
