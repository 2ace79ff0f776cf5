"""Trace a tensor-parallel plan: by what feeds what in one forward.

Linears that one tensor feeds are columns, the single linear that comes next in the same block, and
leads back to the width they took, is their row. Only widths that fit are taken: columns must make
what the row takes (or a divisor: fewer heads for keys), or, where one packs several projections, a
multiple of it.

Elsewhere, and of any widths, columns are those whose outputs one linear takes feature by feature
(`plan/feature_flow`).
"""

from collections.abc import Iterator
from itertools import groupby, pairwise

from torch import nn

from nbdist.engine.layout.axes.tp import multihead
from nbdist.engine.layout.axes.tp.cuts import (
    COLUMN,
    HEAD,
    ROW,
    SUMMED,
    VOCAB,
    ColumnRowPair,
    Cut,
    TensorPlan,
)
from nbdist.engine.layout.plan.adapted import layer_in
from nbdist.engine.layout.plan.blocks import find_blocks
from nbdist.engine.layout.plan.projection import dims_of, packed_sizes, widths_of
from nbdist.engine.layout.plan.trace import ModuleCall

ATTENTION = (
    "packs its projections, and counts with the whole width: write q, k, v and out as nn.Linear "
    "around F.scaled_dot_product_attention"
)


def plan(
    model: nn.Module,
    calls: list[ModuleCall],
    of_packed: str | None,
    crossed: bool,
    parts: int,
) -> TensorPlan:
    """Return a plan by the data's way.

    Args:
        model: Not changed.
        calls: Of a forward.
        of_packed: How a column is cut that packs projections; None keeps it whole.
        crossed: Whether a linear before several beside it is a column as they are: a query, for
            keys and values of another sequence.
        parts: Ranks that share a weight, also of what is left: torch's own attentions, and where
            features flow from one linear to the next; 0 leaves those whole.
    """
    once = _called_once(calls)
    linears = [c for c in calls if dims_of(c.module) is not None and c.name in once]
    cuts: dict[str, Cut] = {}
    left: list[tuple[str, str]] = []
    pairs = [*_by_widths(model, linears, calls, cuts, left, of_packed, crossed)]
    if parts:
        pairs += _flowing(linears, calls, cuts, parts)
        pairs += _attentions(model, calls, cuts, parts)
        order = [call.name for call in calls]
        pairs.sort(key=lambda pair: order.index(pair.row))
    left = [(name, why) for name, why in left if name not in cuts]
    if not pairs:
        left += [(c.name, f"makes what is mixed: {c.mixed}") for c in linears if c.mixed]
    left = [(n, _whole(m, parts)) for n, m in _attentions_of(model) if n not in cuts] + left
    found = TensorPlan("tracing one forward", tuple(cuts.values()), tuple(pairs), tuple(left))
    return _with_vocabulary(model, found, calls) if pairs else found


def _by_widths(
    model: nn.Module,
    linears: list[ModuleCall],
    calls: list[ModuleCall],
    cuts: dict[str, Cut],
    left: list[tuple[str, str]],
    of_packed: str | None,
    crossed: bool,
) -> Iterator[ColumnRowPair]:
    """Yield pairs in a block of which the row leads back to the width that columns took."""
    blocks = tuple(find_blocks(model))
    # Tensors are compared by identity: `calls` keeps them alive.
    groups = [list(g) for _, g in groupby(linears, lambda c: (id(c.fed), _block(c.name, blocks)))]
    for group, after in pairwise(_crossed(groups) if crossed else groups):
        row = after[0]
        names = tuple(call.name for call in group)
        same_block = _block(row.name, blocks) == _block(names[0], blocks)
        if len(after) > 1 or not same_block or names[0] in cuts or _made(row) != _taken(group[0]):
            continue
        style, why = COLUMN, _misfit(group, row)
        is_alone = len(group) == 1 and layer_in(model.get_submodule(names[0])) is None
        if why and of_packed and is_alone and packed_sizes(group[0].module, row.module):
            style, why = of_packed, ""
        if why:
            left += [(name, why) for name in (*names, row.name)]
        else:
            yield _pair(cuts, names, row.name, style, _between(calls, names[0], row.name))


def _pair(
    cuts: dict[str, Cut], columns: tuple[str, ...], row: str, style: str, between: list[str]
) -> ColumnRowPair:
    """Add the cuts of columns, their row and what is between them; return the pair."""
    beside = f"shares its input with {len(columns) - 1} more" if columns[1:] else "feeds a row"
    cuts |= {name: Cut(name, style, beside) for name in columns}
    cuts[row] = Cut(row, ROW, "consumes the output of the columns")
    for name in between:
        cuts.setdefault(name, Cut(name, SUMMED, "sees a part of the features"))
    return ColumnRowPair(columns, row)


def _flowing(
    linears: list[ModuleCall], calls: list[ModuleCall], cuts: dict[str, Cut], parts: int
) -> Iterator[ColumnRowPair]:
    """Yield pairs of what no pair has, whose features flow from one to the other; in order."""
    for row in linears:
        columns = tuple(call.name for call in linears if call.feeds == row.name)
        # All that a row takes: else some of it would be whole.
        is_all = bool(row.sees) and row.sees == set(columns)
        if is_all and _taken(row) % parts == 0 and not cuts.keys() & {row.name, *columns}:
            between = [c.name for c in calls if c.sees & row.sees and c.name != row.name]
            yield _pair(cuts, columns, row.name, COLUMN, between)


def _attentions(
    model: nn.Module, calls: list[ModuleCall], cuts: dict[str, Cut], parts: int
) -> Iterator[ColumnRowPair]:
    """Yield torch's own attentions, where ranks can share the heads."""
    for call in calls:
        name = call.name
        cut = multihead.cut_of(name, model.get_submodule(name), parts)
        if cut is not None and name not in cuts:
            cuts[name] = cut
            yield ColumnRowPair((name,), name)


def _attentions_of(model: nn.Module) -> Iterator[tuple[str, nn.MultiheadAttention]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield name, module


def _whole(module: nn.MultiheadAttention, parts: int) -> str:
    """Return why an attention is kept whole."""
    if parts and type(module) is nn.MultiheadAttention and module.num_heads % parts:
        return f"has {module.num_heads} heads, which tp={parts} does not divide"
    return f"is a {type(module).__name__}, which {ATTENTION}"


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


def _with_vocabulary(model: nn.Module, plan: TensorPlan, calls: list[ModuleCall]) -> TensorPlan:
    """Cut the token embedding, and the head over the same entries, at the model's two ends."""
    blocks = tuple(find_blocks(model))
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
