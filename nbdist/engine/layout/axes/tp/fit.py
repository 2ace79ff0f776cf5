"""Refuse, before anything is changed, a model that tp cannot cut into so many parts.

Widths and heads must be divisible; tied parameters must be cut equally; and the forward must run on
what one rank will hold, which is tried on fake tensors.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nbdist.engine.layout.axes.tp.cuts import (
    COLUMN,
    HEAD,
    ROW,
    VOCAB,
    WORDS,
    TensorPlan,
    cut_dims,
    is_known,
)
from nbdist.engine.layout.plan import trace
from nbdist.engine.layout.plan.adapted import layer_of
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.shared.errors import LayoutError

_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nheads", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_CUTTABLE: dict[str, tuple[type[nn.Module], ...]] = {
    COLUMN: (nn.Linear,),
    ROW: (nn.Linear,),
    HEAD: (nn.Linear,),
    VOCAB: (nn.Embedding,),
}


def check(model: nn.Module, plan: TensorPlan, tp: int, inputs: Inputs | None) -> None:
    """Refuse a plan that does not fit the model.

    Args:
        model: Not changed.
        plan: From `find_plan`.
        tp: Ranks that share a weight.
        inputs: With which the model runs; None leaves the try out.

    Raises:
        LayoutError: With the numbers, and the nearest thing that works.
    """
    for cut in plan.cuts:
        module = layer_of(model.get_submodule(cut.module))
        wanted = _CUTTABLE.get(cut.style) if isinstance(cut.style, str) else None
        if wanted and not isinstance(module, wanted):
            raise LayoutError(
                f'{cut.module} is a {type(module).__name__} and cannot be cut as "{cut.style}".',
                why=f"tp cuts {wanted[0].__name__} layers so; other classes may pack or transpose "
                "their weight",
                do="write it as separate Linear layers, or leave it out of the plan",
            )
    _check_sizes(_sizes(model, plan), tp)
    _check_ties(model, plan)
    if inputs is not None and is_known(plan):
        trace.run_in_parts(model, inputs, parts(model, plan, tp))


def _check_sizes(sizes: list[tuple[str, int]], tp: int) -> None:
    """Refuse what tp does not divide, with the nearest tp that divides all."""
    for what, size in sizes:
        if size % tp:
            common = math.gcd(*(n for _, n in sizes))
            works = [n for n in range(2, common + 1) if common % n == 0]
            nearest = min(works, key=lambda n: abs(n - tp)) if works else 0
            raise LayoutError(
                f"{what.format(size)}, which tp={tp} does not divide.",
                why="every rank takes as many of them",
                do=f"tp={nearest} is the nearest that works"
                if nearest
                else 'use "zero3" instead of tp, or leave the module out with a plan of your own',
            )


def _sizes(model: nn.Module, plan: TensorPlan) -> list[tuple[str, int]]:
    """Return the numbers that must be divisible: (text with a place for the number, the number)."""
    sizes = []
    for pair in plan.pairs:
        if len(pair.columns) > 1:
            owner = pair.owner or type(model).__name__
            # An mlp with a gate has two columns; the model's numbers of heads are not its.
            config = getattr(model, "config", None) if len(pair.columns) > 2 else None
            places = [model.get_submodule(pair.owner), config]
            heads, key_heads = _count(places, _HEADS), _count(places, _KEY_HEADS)
            sizes += [(owner + " has {} heads", heads)] if heads else []
            sizes += [(owner + " has {} heads for keys and values", key_heads)] if key_heads else []
    for cut in plan.cuts:
        module = model.get_submodule(cut.module)
        for name, dim in cut_dims(cut.style, module).items():
            kind = "entries" if cut.style in (VOCAB, HEAD) else "features"
            size = int(module.get_parameter(name).shape[dim])
            sizes.append((cut.module + " has {} " + kind, size))
    return sizes


def _count(places: list[Any], names: tuple[str, ...]) -> int:
    found = (getattr(place, name, None) for place in places for name in names)
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool)), 0)


def ties(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Yield the places, (module, name), of each parameter in several modules."""
    places: dict[int, list[tuple[str, str]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((prefix, name))
    yield from (found for found in places.values() if len(found) > 1)


def _check_ties(model: nn.Module, plan: TensorPlan) -> None:
    cut: dict[str, int] = {}
    for each in plan.cuts:
        within = cut_dims(each.style, model.get_submodule(each.module))
        cut |= {f"{each.module}.{name}": dim for name, dim in within.items()}
    for places in ties(model):
        styles = [plan.style_of(module) for module, _ in places]
        if any(style is not None and style not in WORDS for style in styles):
            continue  # a style of torch: whether the parts agree shows when it is applied
        if len({cut.get(f"{module}.{name}") for module, name in places}) > 1:
            names = " and ".join(f"{module}.{name}" for module, name in places)
            raise LayoutError(
                f"{names} are one parameter, and the plan for tp cuts them in different ways.",
                do='cut both equally ("vocab" and "head" go together), or leave both out',
            )


def parts(model: nn.Module, plan: TensorPlan, tp: int) -> dict[str, torch.Size]:
    """Return the shapes that one rank holds, of the pairs: ends are put together again."""
    shapes = dict[str, torch.Size]()
    for cut in plan.cuts:
        if cut.style in (COLUMN, ROW):
            module = model.get_submodule(cut.module)
            for name, dim in cut_dims(cut.style, module).items():
                shape = list(module.get_parameter(name).shape)
                shape[dim] //= tp
                shapes[f"{cut.module}.{name}"] = torch.Size(shape)
    return shapes
