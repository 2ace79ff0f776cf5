"""Which reducers of DDP a reset does not heal: those in which ranks would not agree.

A reducer changes in its first steps. With a static graph it learns in the first backward how often
each parameter is used, and a first backward that was lost is learnt twice; in an early step it lays
its buckets anew, and a fault in the midst of that may leave ranks with different ones. gloo ends
the process when buckets of different sizes meet. Such reducers are made anew, on all ranks.

Threads: the main one.
"""

import json
from collections.abc import Callable, Iterable
from weakref import WeakSet

from torch.nn.parallel import DistributedDataParallel

from nbdist.engine import identity
from nbdist.engine.compat import torch_compat, torch_live, torch_modules

Exchange = Callable[[str], dict[int, str]]  # a text of this rank: what each rank has told

_has_ended_step: "WeakSet[DistributedDataParallel]" = WeakSet()


def at_boundary() -> None:
    """Note which modules have a first backward behind them. At the end of an optimizer step."""
    for ddp in torch_live.live(DistributedDataParallel):
        if torch_modules.has_begun_backward(ddp):
            _has_ended_step.add(ddp)


def to_remake(
    ddps: Iterable[DistributedDataParallel], exchange: Exchange
) -> list[DistributedDataParallel]:
    """Return the modules whose reducers must be made anew, the same ones on all ranks.

    Args:
        ddps: This rank's modules, in the order of making.
        exchange: Called once, on every rank.
    """
    named = _named(ddps)
    heard = exchange(json.dumps({key: _fact(ddp) for key, ddp in named.items()}))
    told = [json.loads(text) for text in heard.values()]
    return [
        ddp
        for key, ddp in named.items()
        if must_remake([facts[key] for facts in told if key in facts])
    ]


def must_remake(facts: list[str]) -> bool:
    """Return whether ranks that told these facts of a module need new reducers."""
    return "first step" in facts or len(set(facts)) > 1


def _fact(ddp: DistributedDataParallel) -> str:
    if ddp.static_graph and ddp not in _has_ended_step:
        return "first step"
    return "new buckets" if torch_modules.has_rebuilt_buckets(ddp) else "first buckets"


def _named(ddps: Iterable[DistributedDataParallel]) -> dict[str, DistributedDataParallel]:
    """Return the modules by the names that all ranks of their groups have for them."""
    return {
        name: ddp
        for ddp in ddps
        # Of others the group is gone: nobody can train them.
        if torch_compat.ranks_of(ddp.process_group) and (name := identity.of(ddp))
    }
