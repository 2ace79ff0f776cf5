"""Refuse, before anything is changed, a model that tp cannot cut into so many parts.

Widths and heads must be divisible; tied parameters must be cut equally; and the forward must run on
what one rank will hold, which is tried on fake tensors.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nbdist.engine.compat import torch_quantized
from nbdist.engine.layout.axes.tp import local_sizes, multihead
from nbdist.engine.layout.axes.tp.cuts import (
    BOTH,
    COLUMN,
    COPIED,
    GATHER,
    HEAD,
    HEADS,
    PACKED,
    ROW,
    SPLIT,
    VOCAB,
    Cut,
    TensorPlan,
    cut_dims,
    is_known,
)
from nbdist.engine.layout.axes.tp.sections import Sections
from nbdist.engine.layout.plan import trace
from nbdist.engine.layout.plan.adapted import layer_of
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.engine.layout.plan.projection import dims_of
from nbdist.shared.errors import LayoutError

_CUTTABLE: dict[str, type[nn.Module]] = {
    COLUMN: nn.Linear,
    PACKED: nn.Linear,
    ROW: nn.Linear,
    GATHER: nn.Linear,
    SPLIT: nn.Linear,
    HEAD: nn.Linear,
    VOCAB: nn.Embedding,
}
_TRANSPOSED = (COLUMN, PACKED, ROW)  # as which a projection is cut that lies (in, out), too
IN_PARTS = (COLUMN, PACKED, ROW, HEADS, *BOTH)  # the rest is put together again at once


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
        place = model.get_submodule(cut.module)
        module = layer_of(place)
        wanted = _CUTTABLE.get(cut.style) if isinstance(cut.style, str) else None
        # An adapter's numbers lie as those of a Linear.
        is_projection = cut.style in _TRANSPOSED and place is module and dims_of(place) is not None
        if wanted and not isinstance(module, wanted) and not is_projection:
            raise LayoutError(
                f'{cut.module} is a {type(module).__name__} and cannot be cut as "{cut.style}".',
                why=f"tp cuts {wanted.__name__} layers so; other classes may pack or transpose "
                "their weight",
                do="write it as separate Linear layers, or leave it out of the plan",
            )
        _check_plain(cut, module)
    _check_sizes(_sizes(model, plan), tp)
    _check_ties(model, plan)
    if inputs is not None and is_known(plan):
        with local_sizes.divided(model, plan.sizes), multihead.on_parts(model, plan):
            trace.run_in_parts(model, inputs, parts(model, plan, tp))


def _check_plain(cut: Cut, layer: nn.Module) -> None:
    """Refuse a cut through a quantized weight."""
    held = layer.parameters(recurse=False)
    found = next((p for p in held if torch_quantized.is_quantized(p)), None)
    if found is not None:
        raise LayoutError(
            f"The weight of {cut.module} is a {type(found).__name__}, which tp cannot cut.",
            why="its numbers share scales, and its class says how it is cut to nobody",
            do='use "zero3", "ddp" or pp, which keep quantized weights whole; or leave it out with '
            "a plan of your own: TensorParallel(plan={...})",
        )


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
            heads = _count(places, local_sizes.HEADS)
            are_cut = all(plan.style_of(name) != COPIED for name in pair.columns)
            key_heads = _count(places, local_sizes.KEY_HEADS) if are_cut else 0
            sizes += [(owner + " has {} heads", heads)] if heads else []
            sizes += [(owner + " has {} heads for keys and values", key_heads)] if key_heads else []
    for cut in plan.cuts:
        module = model.get_submodule(cut.module)
        for own in cut_dims(cut, module).values():
            sizes += [(_has(cut), size) for size in own.sizes]
    return sizes


def _has(cut: Cut) -> str:
    kind = {VOCAB: "entries", HEAD: "entries", HEADS: "heads"}.get(cut.style, "features")
    each = " in a projection" if any(len(own.sizes) > 1 for own in cut.own.values()) else ""
    return f"{cut.module} has {{}} {kind}{each}"


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
    cut: dict[str, Sections] = {}
    for each in plan.cuts:
        within = cut_dims(each, model.get_submodule(each.module))
        cut |= {f"{each.module}.{name}": own for name, own in within.items()}
    for places in ties(model):
        styles = [plan.style_of(module) for module, _ in places]
        if any(style is not None and not isinstance(style, str) for style in styles):
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
        if cut.style in IN_PARTS:
            module = model.get_submodule(cut.module)
            for name, own in cut_dims(cut, module).items():
                shape = list(module.get_parameter(name).shape)
                shape[own.dim] //= tp
                shapes[f"{cut.module}.{name}"] = torch.Size(shape)
    return shapes
