"""Find a model's tensor-parallel plan: the user's, the model's own, or a traced one.

The traced plan follows the data: linears that one tensor feeds are columns, the single linear that
comes next in the same block, and leads back to the width they took, is their row. Only widths that
fit are taken: columns must make what the row takes (or a divisor: fewer heads for keys). A packed
projection makes more, does not show by its shape how to cut it, and is left whole.

A model's own plan is that of the modules whose classes have one, by names as they are in the model:
a wrapper around one may pass its attributes on, and its names have the wrapper's before them.
"""

import inspect
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import groupby, pairwise
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from nbdist.engine.layout.axes.tp.cuts import (
    COLUMN,
    HEAD,
    ROW,
    SUMMED,
    VOCAB,
    WORDS,
    ColumnRowPair,
    Cut,
    TensorPlan,
)
from nbdist.engine.layout.plan.adapted import layer_in
from nbdist.engine.layout.plan.blocks import find_blocks
from nbdist.engine.layout.plan.trace import ModuleCall
from nbdist.shared.errors import LayoutError

# transformers' words for what we do, in its releases 4 and 5.
_THEIR_WORDS = {
    "colwise": COLUMN,
    "rowwise": ROW,
    "colwise_rep": HEAD,
    "colwise_gather_output": HEAD,
    "embedding_rowwise": VOCAB,
    "replicated_with_grad_allreduce": SUMMED,
}
_WHOLE = ("replicate", "replicated")

# Packs several projections into one parameter; by the class's name, for transformers may be absent.
_PACKED = ("MultiheadAttention", "Conv1D")


def find_plan(
    model: nn.Module, own_words: Mapping[str, Any] | None, calls: list[ModuleCall], tp: int
) -> TensorPlan:
    """Return the plan that counts.

    Args:
        model: Not changed.
        own_words: The user's plan, if there is one.
        calls: The calls of a forward.
        tp: Ranks that share a weight.

    Raises:
        LayoutError: A key without a module, a word that is none, or nothing to cut.
    """
    if own_words is not None:
        plan = _from_words(model, own_words, "your plan", "by your plan")
    elif theirs := plan_of(model):
        plan = _from_words(model, theirs, "the model's own plan", "by its tp_plan")
    else:
        plan = _traced(model, calls)
    plan = _with_pairs(plan, calls) if not plan.pairs else plan
    if own_words is None:
        plan = _fit_vocabulary(model, plan, tp)
    if not plan.cuts:
        raise _nothing_found(model, plan)
    return plan


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


# ---- From words --------------------------------------------------------------------------------


def _from_words(model: nn.Module, words: Mapping[str, Any], source: str, why: str) -> TensorPlan:
    modules = dict(model.named_modules())
    styles: dict[str, Any] = {}
    for key, word in words.items():
        style = _style(key, word)
        found = [name for name in modules if _matches(name, key)]
        if not found:
            raise LayoutError(
                f'No module is called "{key}", which {source} for tp names.',
                do="use names of model.named_modules(), with * for one part of a name",
            )
        styles |= {} if style is None else dict.fromkeys(found, style)
    return TensorPlan(source, tuple(Cut(n, styles[n], why) for n in modules if n in styles))


def _matches(name: str, key: str) -> bool:
    """Return whether `*` in a key, which stands for one part of a name, makes them the same."""
    parts, wanted = name.split("."), key.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _style(key: str, word: Any) -> Any:
    if isinstance(word, ParallelStyle) or word in WORDS:
        return word
    if word in _THEIR_WORDS:
        return _THEIR_WORDS[word]
    if word in _WHOLE:
        return None
    raise LayoutError(
        f'"{word}", which the plan for tp says of {key}, is not a known way to cut.',
        why=f"it has {', '.join(WORDS)}, and takes styles of torch.distributed.tensor.parallel",
        do="give a plan with these: TensorParallel(plan={...})",
    )


def _with_pairs(plan: TensorPlan, calls: list[ModuleCall]) -> TensorPlan:
    """Find the columns that feed each row, in the order of a forward."""
    style = {cut.module: cut.style for cut in plan.cuts}
    pairs: list[ColumnRowPair] = []
    columns: list[str] = []
    for call in calls:
        if style.get(call.name) == COLUMN and call.name not in columns:
            columns.append(call.name)
        elif style.get(call.name) == ROW and columns:
            pairs.append(ColumnRowPair(tuple(columns), call.name))
            columns = []
    return TensorPlan(plan.source, plan.cuts, tuple(dict.fromkeys(pairs)), plan.left)


# ---- By tracing --------------------------------------------------------------------------------


def _traced(model: nn.Module, calls: list[ModuleCall]) -> TensorPlan:
    blocks = tuple(find_blocks(model))
    once = _called_once(calls)
    linears = [c for c in calls if isinstance(c.module, nn.Linear) and c.name in once]
    # Tensors are compared by identity: `calls` keeps them alive.
    groups = [list(g) for _, g in groupby(linears, lambda c: (id(c.fed), _block(c.name, blocks)))]
    cuts: dict[str, Cut] = {}
    pairs: list[ColumnRowPair] = []
    left: list[tuple[str, str]] = []
    for group, after in pairwise(groups):
        row = after[0]
        names = tuple(call.name for call in group)
        same_block = _block(row.name, blocks) == _block(names[0], blocks)
        if len(after) > 1 or not same_block or names[0] in cuts:
            continue
        if row.module.out_features != group[0].module.in_features:
            continue
        if why := _misfit(group, row):
            left += [(name, why) for name in (*names, row.name)]
            continue
        beside = f"shares its input with {len(names) - 1} more" if names[1:] else "feeds a row"
        cuts |= {name: Cut(name, COLUMN, beside) for name in names}
        cuts[row.name] = Cut(row.name, ROW, "consumes the output of the columns")
        cuts |= {
            name: Cut(name, SUMMED, "sees a part of the features")
            for name in _between(calls, names[0], row.name)
            if name not in cuts
        }
        pairs.append(ColumnRowPair(names, row.name))
    plan = TensorPlan("tracing one forward", tuple(cuts.values()), tuple(pairs), tuple(left))
    return _with_vocabulary(model, plan, calls, blocks) if pairs else plan


def _misfit(group: list[ModuleCall], row: ModuleCall) -> str:
    """Return why widths do not show how to cut a pair; empty where they do."""
    wanted = row.module.in_features
    widths = [call.module.out_features for call in group]
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
        kind = type(module).__name__
        if kind in _PACKED:
            return name, f"is a {kind}, which packs several projections into one parameter"
    return plan.left[0] if plan.left else ("", "")
