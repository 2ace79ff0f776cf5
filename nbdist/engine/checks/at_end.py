"""Report fingerprints of every replica at a cell's end: of all parameters, trained or frozen.

Of each layout and of each DistributedDataParallel, whoever made it. A model unchanged since
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

from nbdist.engine.checks.fingerprints import fingerprints_by_name, replicated_parameters
from nbdist.engine.compat import torch_modules
from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.group import identity
from nbdist.engine.layout.layout import Layout, live_layouts
from nbdist.shared import wire

_log = logging.getLogger("nbdist.checks")

Add = Callable[[str, int, dict[str, float]], None]
Held = list[tuple[str, Tensor]]  # names and this rank's plain tensors
_State = tuple[tuple[int, int], ...]


class AtEnd:
    """Reports each model when a cell ends."""

    def __init__(self, add: Add) -> None:
        """Begin; `add` makes a record of a kind, a step and its values."""
        self._add = add
        self._sent: WeakKeyDictionary[Any, tuple[_State, dict[str, float]]] = WeakKeyDictionary()

    def report(self) -> None:
        """Report all living models; a report of one that another rank lacks is not used."""
        for owner, name in _replicated():
            try:
                self._report(owner, name)
            except Exception:  # such as a layout of more ranks than there are now
                _log.exception("A model at the cell's end could not be read")

    def _report(self, owner: Any, name: str) -> None:
        held = [(f"{name}:{n}", t) for n, t in _held(owner) if t.numel() and not t.is_meta]
        if not held:
            return
        state = tuple((id(t), 0 if t.is_inference() else t._version) for _, t in held)
        before, values = self._sent.get(owner, ((), {}))
        if state != before:
            values = fingerprints_by_name(held)
            self._sent[owner] = state, values
        self._add("alike", wire.CELL_END, dict(values))


def _replicated() -> Iterator[tuple[Layout | DistributedDataParallel, str]]:
    """Yield layouts and DDPs with names that are the same on all ranks, and those ranks."""
    reducers = set()
    for layout in live_layouts():
        reducer = torch_modules.reducer_of(layout.model)
        reducers.add(id(reducer))
        own = layout.name_on_ranks if reducer is None else identity.here.of(reducer)
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
        yield from replicated_parameters(owner)
    else:
        averaged = torch_modules.kept_alike(owner)
        yield from ((n, p) for n, p in averaged if not isinstance(p, DTensor))
