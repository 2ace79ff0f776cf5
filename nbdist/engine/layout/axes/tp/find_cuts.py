"""Find a model's tensor-parallel plans: the user's, the model's own, or traced ones.

A traced plan follows the data: linears that one tensor feeds are columns, the single linear that
comes next in the same block, and leads back to the width they took, is their row. Only widths that
fit are taken: columns must make what the row takes (or a divisor: fewer heads for keys), or, where
one packs several projections, a multiple of it. Shapes do not show all: what is packed may lie one
below the other or head by head, and a forward may count with numbers of the whole. So there are
several plans, the likeliest first, of which the first is taken that a forward proves.

A model's own plan is that of the modules whose classes have one, by names as they are in the model:
a wrapper around one may pass its attributes on, and its names have the wrapper's before them.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

from torch import nn

from nbdist.engine.layout.axes.tp import local_sizes, plan_words
from nbdist.engine.layout.axes.tp.cuts import (
    COLUMN,
    COLUMNS,
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
from nbdist.engine.layout.axes.tp.projection import dims_of, widths_of
from nbdist.engine.layout.axes.tp.sections import Sections, one
from nbdist.engine.layout.plan.adapted import layer_in, layer_of
from nbdist.engine.layout.plan.blocks import find_blocks
from nbdist.engine.layout.plan.trace import ModuleCall
from nbdist.shared.errors import LayoutError

_ATTENTION = (
    "packs its projections, and counts with the whole width: write q, k, v and out as nn.Linear "
    "around F.scaled_dot_product_attention"
)


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
        plans = [_traced(model, calls, of_packed, crossed) for of_packed, crossed in ways]
    tried = list[TensorPlan]()
    for found in plans:
        plan = _with_pairs(found, calls) if not found.pairs else found
        plan = _sectioned(model, plan)
        if own_words is None:
            plan = _fit_vocabulary(model, plan, tp)
        for counted in _counted(model, plan, tp) if plan.cuts else ():
            if counted not in tried:
                tried.append(counted)
                yield counted
    if not tried:
        raise _nothing_found(model, plan)


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


def _sectioned(model: nn.Module, plan: TensorPlan) -> TensorPlan:
    """Return the plan with the sizes of what is packed, which follow from the rows.

    Raises:
        LayoutError: They do not.
    """
    for cut in plan.cuts:
        if cut.style == PACKED and not cut.own:
            row = next((pair.row for pair in plan.pairs if cut.module in pair.columns), None)
            layer = model.get_submodule(cut.module)
            sizes = row and _sizes(layer, layer_of(model.get_submodule(row)))
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


def _sizes(layer: nn.Module, row: nn.Module) -> tuple[int, ...]:
    """Return the sizes of the projections that a layer packs; empty where its row shows none.

    They are as wide as what the row takes, or but the first is, and two more are narrower: an
    attention with fewer heads for keys and values.
    """
    made, taken = widths_of(layer), widths_of(row)
    if made is None or taken is None or made[1] <= taken[0]:
        return ()
    count, left = divmod(made[1], taken[0])
    if not left:
        return (taken[0],) * count
    narrow, odd = divmod(made[1] - taken[0], 2)
    return () if odd or narrow > taken[0] else (taken[0], narrow, narrow)


def _counted(model: nn.Module, plan: TensorPlan, tp: int) -> Iterator[TensorPlan]:
    """Yield a plan as it is, and with what else its forward may count with cut or divided."""
    widths = {pair.row: _widths_in(model, plan, pair) for pair in plan.pairs}
    tables = _tables(model, plan, tp)
    for features in (None, widths, {}):
        found = [] if features is None else local_sizes.find(model, plan, tp, features)
        for counted in (plan.with_cuts(tables), plan) if found else (plan, plan.with_cuts(tables)):
            yield replace(counted, sizes=tuple(found))


def _widths_in(model: nn.Module, plan: TensorPlan, pair: ColumnRowPair) -> set[int]:
    """Return the widths that are cut between the columns and the row of a pair."""
    widths = set[int]()
    for cut in plan.cuts:
        if cut.module in pair.columns:
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


# ---- By tracing --------------------------------------------------------------------------------


def _traced(
    model: nn.Module, calls: list[ModuleCall], of_packed: str | None, crossed: bool
) -> TensorPlan:
    """Return a plan by the data's way.

    Args:
        model: Not changed.
        calls: Of a forward.
        of_packed: How a column is cut that packs projections; None keeps it whole.
        crossed: Whether a linear before several beside it is a column as they are: a query, for
            keys and values of another sequence.
    """
    blocks = tuple(find_blocks(model))
    once = _called_once(calls)
    linears = [c for c in calls if dims_of(c.module) is not None and c.name in once]
    # Tensors are compared by identity: `calls` keeps them alive.
    groups = [list(g) for _, g in groupby(linears, lambda c: (id(c.fed), _block(c.name, blocks)))]
    if crossed:
        groups = _crossed(groups)
    cuts: dict[str, Cut] = {}
    pairs: list[ColumnRowPair] = []
    left: list[tuple[str, str]] = []
    for group, after in pairwise(groups):
        row = after[0]
        names = tuple(call.name for call in group)
        same_block = _block(row.name, blocks) == _block(names[0], blocks)
        if len(after) > 1 or not same_block or names[0] in cuts:
            continue
        if _made(row) != _taken(group[0]):
            continue
        style, why = COLUMN, _misfit(group, row)
        is_alone = len(group) == 1 and layer_in(model.get_submodule(names[0])) is None
        if why and of_packed and is_alone and _sizes(group[0].module, row.module):
            style, why = of_packed, ""
        if why:
            left += [(name, why) for name in (*names, row.name)]
            continue
        beside = f"shares its input with {len(names) - 1} more" if names[1:] else "feeds a row"
        cuts |= {name: Cut(name, style, beside) for name in names}
        cuts[row.name] = Cut(row.name, ROW, "consumes the output of the columns")
        cuts |= {
            name: Cut(name, SUMMED, "sees a part of the features")
            for name in _between(calls, names[0], row.name)
            if name not in cuts
        }
        pairs.append(ColumnRowPair(names, row.name))
    left += [(n, _ATTENTION) for n, m in model.named_modules() if _is_attention(m)]
    plan = TensorPlan("tracing one forward", tuple(cuts.values()), tuple(pairs), tuple(left))
    return _with_vocabulary(model, plan, calls, blocks) if pairs else plan


def _crossed(groups: list[list[ModuleCall]]) -> list[list[ModuleCall]]:
    """Return the groups with a query beside its keys and values, which another tensor feeds."""
    joined = list[list[ModuleCall]]()
    for group in groups:
        last = joined[-1] if joined else []
        is_query = len(last) == 1 and len(group) > 1 and _parent(last[0]) == _parent(group[0])
        if is_query:
            joined[-1] = [*last, *group]
        else:
            joined.append(group)
    return joined


def _parent(call: ModuleCall) -> str:
    return call.name.rpartition(".")[0]


def _taken(call: ModuleCall) -> int:
    return (widths_of(call.module) or (0, 0))[0]


def _made(call: ModuleCall) -> int:
    return (widths_of(call.module) or (0, 0))[1]


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def _misfit(group: list[ModuleCall], row: ModuleCall) -> str:
    """Return why widths do not show how to cut a pair; empty where they do."""
    wanted = _taken(row)
    widths = [_made(call) for call in group]
    if max(widths) == wanted and all(wanted % width == 0 for width in widths):
        return ""
    made = " + ".join(map(str, widths))
    return f"makes {made} features and the next layer takes {wanted}: packed, or changed in between"


def _called_once(calls: list[ModuleCall]) -> set[str]:
    names = [call.name for call in calls]
    return {name for name in names if names.count(name) == 1}


def _between(calls: list[ModuleCall], column: str, row: str) -> list[str]:
    order = [call.name for call in calls]
    return order[order.index(column) + 1 : order.index(row)]


def _block(name: str, blocks: tuple[str, ...]) -> str:
    return next((block for block in blocks if name.startswith(block + ".")), "")


def _with_vocabulary(
    model: nn.Module, plan: TensorPlan, calls: list[ModuleCall], blocks: tuple[str, ...]
) -> TensorPlan:
    """Cut the token embedding, and the head over the same entries, at the model's two ends."""
    once = _called_once(calls)
    outside = [c for c in calls if not _block(c.name, blocks) and c.name in once]
    tables = [c for c in outside if isinstance(c.module, nn.Embedding)]
    if not tables:
        return plan
    entries = tables[0].module.num_embeddings
    heads = [c for c in outside if isinstance(c.module, nn.Linear)][-1:]
    cuts = [Cut(tables[0].name, VOCAB, "the token embedding")]
    if heads and heads[0].module.out_features == entries and not plan.style_of(heads[0].name):
        cuts.append(Cut(heads[0].name, HEAD, "makes the logits of all tokens"))
    return plan.with_cuts(cuts)


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
    name, why = _reason(model, plan)
    return LayoutError(
        f"tp found nothing to cut in {type(model).__name__}.",
        why=f"{name} {why}"
        if name
        else "no Linear feeds a second Linear that maps back to the input's width",
        do='give a plan, TensorParallel(plan={"blocks.*.up": "column", "blocks.*.down": '
        '"row"}), write projections as separate Linear layers, or use "zero3"',
    )


def _reason(model: nn.Module, plan: TensorPlan) -> tuple[str, str]:
    for name, module in model.named_modules():
        if _is_attention(module):
            return name, f"is a {type(module).__name__}, which {_ATTENTION}"
    return plan.left[0] if plan.left else ("", "")
