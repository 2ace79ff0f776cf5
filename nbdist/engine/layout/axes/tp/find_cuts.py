"""Find a model's tensor-parallel plans: the user's, the model's own, or traced ones.

Shapes do not show all: what is packed may lie one below the other or head by head, and a forward
may count with numbers of the whole. So there are several plans, the likeliest first, of which the
first is taken that a forward proves.

A model's own plan is that of the modules whose classes have one, by names as they are in the model:
a wrapper around one may pass its attributes on, and its names have the wrapper's before them.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from nbdist.engine.layout.axes.tp import local_sizes, plan_words, traced
from nbdist.engine.layout.axes.tp.cuts import (
    COLUMN,
    COLUMNS,
    COPIED,
    EXPERTS,
    HEAD,
    HEADS,
    PACKED,
    ROW,
    SUMMED,
    VOCAB,
    ColumnRowPair,
    Cut,
    TensorPlan,
    packed,
)
from nbdist.engine.layout.axes.tp.sections import Sections, one
from nbdist.engine.layout.plan.adapted import layer_in, layer_of
from nbdist.engine.layout.plan.projection import dims_of, packed_sizes, widths_of
from nbdist.engine.layout.plan.trace import ModuleCall
from nbdist.shared.errors import LayoutError


def candidates(
    model: nn.Module, own_words: Mapping[str, Any] | None, calls: list[ModuleCall], tp: int
) -> Iterator[TensorPlan]:
    """Yield the plans that a model may mean, the likeliest first.

    Args:
        model: Not changed.
        own_words: The user's plan, if there is one.
        calls: The calls of a forward.
        tp: Ranks that share a weight.

    Raises:
        LayoutError: A key without a module, a word that is none, or nothing to cut.
    """
    plans = [_from_words(model, own_words)]
    if not any(cut.style != HEAD for cut in plans[0].cuts) and own_words is None:
        ways = ((PACKED, True), (COLUMN, True), (None, True), (None, False))
        plans = [
            traced.plan(model, calls, of_packed, crossed, parts)
            for parts in (tp, 0)
            for of_packed, crossed in ways
        ]
    tried = list[TensorPlan]()
    plans = [_with_pairs(found, calls) if not found.pairs else found for found in plans]
    for found in (*plans, *(_with_whole_keys(model, plan) for plan in plans)):
        plan = _sectioned(model, found)
        if own_words is None:
            plan = _fit_vocabulary(model, plan, tp)
        for counted in _counted(model, plan, tp) if plan.cuts else ():
            if counted not in tried:
                tried.append(counted)
                yield counted
    if not tried:
        raise _nothing_found(model, plans[0])


def _from_words(model: nn.Module, own_words: Mapping[str, Any] | None) -> TensorPlan:
    """Return the user's plan, or the model's own: it may name parts that this model lacks."""
    if own_words is not None:
        return plan_words.read(model, own_words, "your plan", "by your plan")
    theirs, source = plan_of(model) or {}, "the model's own plan"
    return plan_words.read(model, theirs, source, "by its tp_plan", may_lack=True)


def plan_of(model: nn.Module) -> Mapping[str, Any] | None:
    """Return the plan that a model or modules in it bring, as those of transformers do."""
    found: dict[str, Any] = {}
    owners: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(not owner or name.startswith(owner + ".") for owner in owners)
        # By the class: a wrapper that passes the plan on has other names.
        if is_inside or inspect.getattr_static(module, "tp_plan", None) is None:
            continue
        plan = getattr(module, "tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            owners.append(name)
            found |= {f"{name}.{key}" if name else key: word for key, word in plan.items()}
    return found or None


# ---- What is between columns and rows ---------------------------------------------------------


def _with_pairs(plan: TensorPlan, calls: list[ModuleCall]) -> TensorPlan:
    """Find the columns that feed each row, in the order of a forward."""
    style = {cut.module: cut.style for cut in plan.cuts}
    pairs: list[ColumnRowPair] = []
    columns: list[str] = []
    for call in calls:
        if style.get(call.name) in COLUMNS and call.name not in columns:
            columns.append(call.name)
        elif style.get(call.name) == EXPERTS:
            pairs.append(ColumnRowPair((call.name,), call.name))
        elif style.get(call.name) == ROW and columns:
            pairs.append(ColumnRowPair(tuple(columns), call.name))
            columns = []
    return replace(plan, pairs=tuple(dict.fromkeys(pairs)))


def _with_whole_keys(model: nn.Module, plan: TensorPlan) -> TensorPlan:
    """Return the plan with what is narrow whole on each rank: one key for all heads, a gate."""
    for pair in plan.pairs:
        wide = widths_of(layer_of(model.get_submodule(pair.row)))
        made = {name: widths_of(layer_of(model.get_submodule(name))) for name in pair.columns}
        narrow = [name for name, each in made.items() if wide and each and each[1] < wide[0]]
        if len(pair.columns) - len(narrow) == 1:
            why = "whole on each rank, for its heads or features"
            plan = plan.with_cuts(Cut(name, COPIED, why) for name in narrow)
    return plan


def _sectioned(model: nn.Module, plan: TensorPlan) -> TensorPlan:
    """Return the plan with the sizes of what is packed, which follow from the rows.

    Raises:
        LayoutError: They do not.
    """
    for cut in plan.cuts:
        if cut.style == PACKED and not cut.own:
            row = next((pair.row for pair in plan.pairs if cut.module in pair.columns), None)
            layer = model.get_submodule(cut.module)
            sizes = row and packed_sizes(layer, layer_of(model.get_submodule(row)))
            if not sizes:
                raise LayoutError(
                    f"What {cut.module} packs is not known: {plan.source} for tp calls it packed.",
                    why="its sizes follow from the row that takes what it makes"
                    + (f", and {row} does not fit" if row else ", of which a forward shows none"),
                    do="leave it out of the plan, or give an example of a batch: "
                    "TensorParallel(plan={...}, example=batch)",
                )
            plan = plan.with_cuts([replace(cut, own=packed(layer, sizes))])
    return plan


def _counted(model: nn.Module, plan: TensorPlan, tp: int) -> Iterator[TensorPlan]:
    """Yield a plan as it is, and with what else its forward may count with cut or divided."""
    widths = {pair.row: _widths_in(model, plan, pair) for pair in plan.pairs}
    tables = _tables(model, plan, tp)
    # What is divided for whole keys has to be, whether or not the inputs that were tried show it.
    are_copied = any(cut.style == COPIED for cut in plan.cuts)
    for features in ({}, widths) if are_copied else (None, widths, {}):
        found = [] if features is None else local_sizes.find(model, plan, tp, features)
        for counted in (plan.with_cuts(tables), plan) if found else (plan, plan.with_cuts(tables)):
            yield replace(counted, sizes=tuple(found))


def _widths_in(model: nn.Module, plan: TensorPlan, pair: ColumnRowPair) -> set[int]:
    """Return the widths that are cut between the columns and the row of a pair."""
    widths = set[int]()
    for cut in plan.cuts:
        if cut.module in pair.columns and cut.style != COPIED:
            made = widths_of(layer_of(model.get_submodule(cut.module)))
            widths |= {made[1]} if made else set()
            widths |= {size for own in cut.own.values() for size in own.sizes}
    return widths


def _tables(model: nn.Module, plan: TensorPlan, tp: int) -> list[Cut]:
    """Return the cuts of parameters that have a number for each head of their attention."""
    found = list[Cut]()
    for pair in plan.pairs:
        inside = dict(model.get_submodule(pair.owner).named_modules(prefix=pair.owner))
        told = set[int]().union(*map(local_sizes.heads_of, inside.values()))
        heads = told or local_sizes.heads_of(getattr(model, "config", None))
        for name, module in inside.items():
            if plan.style_of(name) not in (None, SUMMED) or dims_of(module) is not None:
                continue
            own = dict[str, Sections]()
            for key, parameter in module._parameters.items():
                shape = () if parameter is None else parameter.shape
                dims = [dim for dim, size in enumerate(shape) if size in heads and size % tp == 0]
                own |= {key: one(dims[0], shape[dims[0]])} if len(dims) == 1 else {}
            found += [Cut(name, HEADS, "has a number for each head", own)] if own else []
    return found


# ---- What does not fit -------------------------------------------------------------------------


def _fit_vocabulary(model: nn.Module, plan: TensorPlan, tp: int) -> TensorPlan:
    """Keep tables and heads whole that cannot be cut, or whose tied partner is kept whole."""
    for cut in plan.cuts:
        if cut.style in (VOCAB, HEAD):
            module: Any = model.get_submodule(cut.module)
            if not isinstance(module, nn.Embedding if cut.style == VOCAB else nn.Linear):
                kind = "has an adapter" if layer_in(module) else f"is a {type(module).__name__}"
                plan = plan.without(cut.module, kind)
            elif module.weight.shape[0] % tp:
                entries = module.weight.shape[0]
                plan = plan.without(cut.module, f"{entries} entries are not divisible by {tp}")
            elif getattr(module, "max_norm", None) is not None:
                plan = plan.without(cut.module, "max_norm changes the embedding during lookup")
    while tied := _tied_to_whole(model, plan):
        plan = plan.without(tied, "tied to a module that is kept whole")
    return plan


def _tied_to_whole(model: nn.Module, plan: TensorPlan) -> str | None:
    """Return a table or head that shares a parameter, such as its bias, with what is kept whole."""
    for cut in plan.cuts:
        if cut.style not in (VOCAB, HEAD):
            continue
        held = {id(p) for p in model.get_submodule(cut.module).parameters(recurse=False)}
        for name, part in model.named_modules():
            shares = any(id(p) in held for p in part._parameters.values())
            if shares and plan.style_of(name) not in (VOCAB, HEAD):
                return cut.module
    return None


def _nothing_found(model: nn.Module, plan: TensorPlan) -> LayoutError:
    name, why = plan.left[0] if plan.left else ("", "")
    return LayoutError(
        f"tp found nothing to cut in {type(model).__name__}.",
        why=f"{name} {why}"
        if name
        else "no Linear feeds a second one feature by feature, nor one that maps back to its width",
        do='give a plan, TensorParallel(plan={"blocks.*.up": "column", "blocks.*.down": '
        '"row"}), write projections as separate Linear layers, or use "zero3"',
    )
