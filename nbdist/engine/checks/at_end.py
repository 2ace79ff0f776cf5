"""Tell, at a cell's end, what every replica holds: all parameters, trained or frozen by then.

Of each layout and of each DistributedDataParallel, whoever made it. What nothing has changed since
the last time is not read again.
"""

import logging
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.checks.fingerprints import parameters_alike, told
from nbdist.engine.compat import torch_groups, torch_modules
from nbdist.engine.group import identity
from nbdist.engine.layout.layout import Layout, live_layouts
from nbdist.shared import wire

_log = logging.getLogger("nbdist.checks")

Add = Callable[[str, int, dict[str, float]], None]
Held = list[tuple[str, Tensor]]  # names and this rank's plain tensors
_State = tuple[tuple[int, int], ...]


class AtEnd:
    """What has been told of each model when the last cell ended."""

    def __init__(self, add: Add) -> None:
        """Begin; `add` makes a record of a kind, a step and its values."""
        self._add = add
        self._told: WeakKeyDictionary[Any, tuple[_State, dict[str, float]]] = WeakKeyDictionary()

    def tell(self) -> None:
        """Tell of all models that are alive here; of one that another rank lacks, for nothing."""
        for owner, name in _replicated():
            try:
                self._tell(owner, name)
            except Exception:  # a layout of more ranks than there are now, say
                _log.exception("What a model holds at the cell's end is not known")

    def _tell(self, owner: Any, name: str) -> None:
        held = [(f"{name}:{n}", t) for n, t in _held(owner) if t.numel() and not t.is_meta]
        if not held:
            return
        state = tuple((id(t), 0 if t.is_inference() else t._version) for _, t in held)
        before, values = self._told.get(owner, ((), {}))
        if state != before:
            values = told(held)
            self._told[owner] = state, values
        self._add("alike", wire.CELL_END, dict(values))


def _replicated() -> Iterator[tuple[Layout | DistributedDataParallel, str]]:
    """Yield layouts and DDPs, with the names that they have on all ranks, and those ranks."""
    reducers = set()
    for layout in live_layouts():
        reducer = torch_modules.reducer_of(layout.model)
        reducers.add(id(reducer))
        own = f"layout {layout.number}" if reducer is None else identity.here.of(reducer)
        if own:
            yield layout, _short(own)
    for ddp in torch_modules.live_ddps():
        ranks = torch_groups.ranks_of(ddp.process_group)
        if id(ddp) not in reducers and len(ranks) > 1 and (own := identity.here.of(ddp)):
            yield ddp, f"{_short(own)}|{','.join(map(str, ranks))}"


def _short(name: str) -> str:
    return blake2b(name.encode(), digest_size=6).hexdigest()


def _held(owner: Layout | DistributedDataParallel) -> Iterator[tuple[str, Tensor]]:
    if isinstance(owner, Layout):
        yield from parameters_alike(owner)
    else:
        averaged = torch_modules.kept_alike(owner)
        yield from ((n, p) for n, p in averaged if not isinstance(p, DTensor))
