"""Numbers of modules that count heads or features, divided while a rank's forward runs.

An attention that says `view(b, -1, self.num_heads, self.head_dim)` or `split(self.width)` counts
with what the whole model has. The numbers are found by their values, in the modules between columns
and their row; whether that is right, a forward proves (`proof`).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from nbdist.engine.layout.axes.tp.cuts import COPIED, Size, TensorPlan

# What modules and configurations call the number of heads.
HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nheads", "heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
# How many heads share a key: divided where keys are whole on each rank.
_HEADS_A_KEY = ("num_key_value_groups", "num_kv_groups", "num_queries_per_kv", "n_rep")


def find(model: nn.Module, plan: TensorPlan, tp: int, widths: dict[str, set[int]]) -> list[Size]:
    """Return the numbers that may have to be divided, in a plan's pairs.

    Args:
        model: Not changed.
        plan: With pairs.
        tp: Ranks that share a weight.
        widths: Of features that are cut, by the row of a pair; an empty dict divides heads alone.
    """
    found: dict[tuple[str, str], Size] = {}
    for pair in plan.pairs:
        own = widths.get(pair.row, set())
        are_copied = any(plan.style_of(name) == COPIED for name in pair.columns)
        names = (*HEADS, *(_HEADS_A_KEY if are_copied else KEY_HEADS))
        for name, module in model.get_submodule(pair.owner).named_modules(prefix=pair.owner):
            if name == pair.row or type(module) in (nn.Linear, nn.Embedding):
                continue  # makes what it always does; or computes with its weight alone
            for attribute, value in vars(module).items():
                counts = attribute in names or (type(value) is int and value in own)
                if type(value) is int and counts and value % tp == 0:
                    found[name, attribute] = Size(name, attribute, value, value // tp)
    return list(found.values())


def heads_of(place: object) -> set[int]:
    """Return the numbers of heads that a module or a configuration tells."""
    told = (getattr(place, name, None) for name in (*HEADS, *KEY_HEADS))
    return {value for value in told if type(value) is int}


@contextmanager
def divided(model: nn.Module, sizes: tuple[Size, ...]) -> Iterator[None]:
    """Have a model count as one rank does."""
    for size in sizes:
        setattr(model.get_submodule(size.module), size.name, size.part)
    try:
        yield
    finally:
        for size in sizes:
            setattr(model.get_submodule(size.module), size.name, size.whole)


def apply(model: nn.Module, sizes: tuple[Size, ...]) -> None:
    """Have the forwards of modules find their own numbers divided, and all others the whole."""
    by_module: dict[str, list[Size]] = {}
    for size in sizes:
        by_module.setdefault(size.module, []).append(size)
    for name, own in by_module.items():
        module = model.get_submodule(name)
        module.forward = _with_parts(module, module.forward, own)


def _with_parts(
    module: nn.Module, forward: Callable[..., Any], sizes: list[Size]
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def with_parts(*args: Any, **keywords: Any) -> Any:
        # A forward within another's finds them divided already.
        taken = [size for size in sizes if getattr(module, size.name) == size.whole]
        try:
            for size in taken:
                setattr(module, size.name, size.part)
            return forward(*args, **keywords)
        finally:
            for size in taken:
                setattr(module, size.name, size.whole)

    return with_parts
