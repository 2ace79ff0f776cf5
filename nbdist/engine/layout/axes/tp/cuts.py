"""A tensor-parallel plan as plain values: which module is cut how, and why. Pure.

    column   weight (out, in) cut over out: each rank computes a part of the features
    packed   a column of several projections, one below the other in a weight: each is cut
    row      cut over in: takes those parts, and its outputs are summed over the ranks
    gather   a column whose output is put together
    split    a row that takes the whole input
    vocab    an embedding cut over its entries; the lookups are summed
    head     a column over the vocabulary: put together, or left cut for a parallel loss
    summed   kept whole, and fed with a part of the features or of the sequence: its gradients are
             summed
    experts  a module that holds columns and rows as parameters of its own
    heads    parameters with a number for each head, such as a bias of positions
    copied   a column that is whole on each rank, as a key for all heads: its gradients, and its
             input's, are summed
    attention  torch's own, `nn.MultiheadAttention`: columns and a row in one, cut by heads

A layer with an adapter is cut together with it: what the adapter adds lies as the layer's weight.

A column and the row that follows form a pair; between them nothing is sent. What is in no plan is
kept whole on every rank.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., 2022 (sequence).
"""

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbdist.engine.layout.axes.tp.sections import Sections, one
from nbdist.engine.layout.plan.adapted import layer_in, layer_of
from nbdist.engine.layout.plan.projection import dims_of, widths_of

if TYPE_CHECKING:
    from torch import nn

WORDS = ("column", "packed", "row", "gather", "split", "vocab", "head", "summed")
COLUMN, PACKED, ROW, GATHER, SPLIT, VOCAB, HEAD, SUMMED = WORDS
# Found, or of transformers' words: with parameters by name.
EXPERTS, HEADS, ATTENTION = "experts", "heads", "attention"
COPIED = "copied"
BOTH = (EXPERTS, ATTENTION)  # columns and their row in one module
COLUMNS = (COLUMN, PACKED, COPIED)


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of one module.

    Attributes:
        module: Its qualified name.
        style: One of `WORDS`, `EXPERTS`, `HEADS`, or a `ParallelStyle` of torch.
        why: For people.
        own: How its parameters are cut, by name, where the style does not tell.
    """

    module: str
    style: Any
    why: str
    own: dict[str, Sections] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Size:
    """A plain number of a module that counts heads or features: a rank's forward finds its part."""

    module: str
    name: str
    whole: int
    part: int


@dataclass(frozen=True, slots=True)
class ColumnRowPair:
    """Columns that are fed by one tensor, and the row that takes what they make."""

    columns: tuple[str, ...]
    row: str

    @property
    def owner(self) -> str:
        """The innermost module that holds all of them: an attention, an mlp."""
        parts = [name.split(".")[:-1] for name in (*self.columns, self.row)]
        common = []
        for here in zip(*parts, strict=False):
            if len(set(here)) > 1:
                break
            common.append(here[0])
        return ".".join(common)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The plan of `tp` for a model.

    Attributes:
        source: Where it comes from, for people.
        cuts: By module, in the model's order.
        pairs: Its columns and rows, as the data flows; experts are both.
        sizes: Numbers that a rank's forward finds divided.
        gradients: Whether ranks add up the gradient of a parameter that stays whole, by name, where
            it was measured; elsewhere the styles tell.
        passed: Why a likelier plan was not taken, in words.
        left: Modules that could look like candidates and are kept whole, with the reason.
    """

    source: str
    cuts: tuple[Cut, ...]
    pairs: tuple[ColumnRowPair, ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    sizes: tuple[Size, ...] = ()
    gradients: dict[str, bool] = field(default_factory=dict)
    passed: str = ""

    def style_of(self, module: str) -> Any:
        """Return a module's style, or None if it is kept whole."""
        return next((cut.style for cut in self.cuts if cut.module == module), None)

    def with_cuts(self, cuts: Iterable[Cut]) -> "TensorPlan":
        """Return the plan with these cuts added, or in the place of those of the same modules."""
        merged = {cut.module: cut for cut in (*self.cuts, *cuts)}
        return replace(self, cuts=tuple(merged.values()))

    def without(self, module: str, why: str) -> "TensorPlan":
        """Return the plan with one module kept whole."""
        kept = tuple(cut for cut in self.cuts if cut.module != module)
        return replace(self, cuts=kept, left=(*self.left, (module, why)))

    def within(self, modules: Container[str]) -> "TensorPlan":
        """Return the plan for a rank that has these modules only."""
        cuts = tuple(cut for cut in self.cuts if cut.module in modules)
        pairs = tuple(pair for pair in self.pairs if pair.row in modules)
        sizes = tuple(size for size in self.sizes if size.module in modules)
        return replace(self, cuts=cuts, pairs=pairs, sizes=sizes)

    def __str__(self) -> str:
        rows = [(cut.module, f"{_word(cut.style)}: {cut.why}") for cut in self.cuts]
        rows += [(module, f"whole: {why}") for module, why in self.left]
        cut = {cut.module for cut in self.cuts}
        rows += [
            (name, "summed: sees a part of the heads or features")
            for name, is_summed in self.gradients.items()
            if is_summed and name.rpartition(".")[0] not in cut
        ]
        rows += [(f"{s.module}.{s.name}", f"{s.part} of {s.whole} in forwards") for s in self.sizes]
        shown: dict[tuple[str, str], int] = {}
        for module, text in rows:
            key = (re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", module), text)
            shown[key] = shown.get(key, 0) + 1
        width = max((len(name) for name, _ in shown), default=0)
        lines = [
            f"  {name:<{width}}  {text}" + (f" ({count} times)" if count > 1 else "")
            for (name, text), count in shown.items()
        ]
        # Where all is cut, nobody asks.
        if self.left and self.passed:
            lines.append(f"  a plan that cuts more was refused: {self.passed}")
        return "\n".join([f"tp cuts, by {self.source}:", *lines])


def _word(style: Any) -> str:
    return style if isinstance(style, str) else type(style).__name__


def cut_dims(cut: Cut, module: "nn.Module") -> dict[str, Sections]:
    """Return how the parameters of a module are cut, by name; empty for one that is kept whole.

    A row's bias is whole: it is added once, to the sum. Of a layer with an adapter, what the
    adapter adds is cut as the weight: where it has all outputs along dim 0, or inputs along dim 1.
    """
    if cut.own:
        return cut.own
    layer: Any = layer_in(module)
    if layer is not None:
        dim = {COLUMN: 0, ROW: 1}.get(cut.style)
        if dim is None:
            return {}
        size = layer.weight.shape[dim]
        cuttable = [n for n, p in _named(module) if p.dim() > dim and p.shape[dim] == size]
        return dict.fromkeys(cuttable, one(dim, size))
    held = {name: p for name, p in module._parameters.items() if p is not None}
    outputs, inputs = dims_of(module) or (0, 1)
    if cut.style in (ROW, SPLIT):
        return {"weight": one(inputs, held["weight"].shape[inputs])}
    if cut.style in (COLUMN, GATHER, VOCAB, HEAD):
        dims = {name: outputs if p.dim() > 1 else 0 for name, p in held.items()}
        return {name: one(dim, held[name].shape[dim]) for name, dim in dims.items()}
    return {}


def packed(module: "nn.Module", sizes: tuple[int, ...]) -> dict[str, Sections]:
    """Return how a weight is cut that packs projections of these sizes, and its bias."""
    outputs, _ = dims_of(module) or (0, 1)
    held = {name: p for name, p in module._parameters.items() if p is not None}
    return {name: Sections(outputs if p.dim() > 1 else 0, sizes) for name, p in held.items()}


def added_once(style: Any, module: "nn.Module") -> list[str]:
    """Return the parameters that each rank may add but a part of: a row's outputs are summed."""
    if style == ATTENTION:
        return [name for name, _ in _named(module) if name == "out_proj.bias"]
    return [n for n, _ in _named(module) if style == ROW and n.rpartition(".")[2] == "bias"]


def _named(module: "nn.Module") -> list[tuple[str, Any]]:
    return list(module.named_parameters(remove_duplicate=False))


def is_known(plan: TensorPlan) -> bool:
    """Return whether a plan has words only: the effect of a style of torch is not known to us."""
    return all(isinstance(cut.style, str) for cut in plan.cuts)


def token_widths(plan: TensorPlan, model: "nn.Module") -> tuple[list[int], list[int]]:
    """Return the bytes, for one token of a batch, of what tp sums and of what it gathers.

    Rows and tables are summed in a forward, what feeds columns and heads in its backward.
    """
    summed: list[int] = []
    gathered: list[int] = []
    for cut in plan.cuts:
        if cut.style in (ROW, GATHER, SPLIT, VOCAB, HEAD, *BOTH):
            outputs, inputs = _widths(model, cut)
            summed.append(outputs if cut.style in (ROW, SPLIT, *BOTH) else inputs)
            # The gradient of what a row has cut by itself is put together.
            gathered += [outputs] if cut.style in (HEAD, GATHER) else []
            gathered += [inputs] if cut.style == SPLIT else []
    summed += [_widths(model, _cut_of(plan, pair.columns[0]))[1] for pair in plan.pairs]
    return summed, gathered


def weight_bytes(plan: TensorPlan, model: "nn.Module", tp: int, ep: int = 1) -> float:
    """Return the bytes of weights a rank sends in one forward and its backward; see `sections`.

    Of experts each rank of ep has a part.
    """
    sent = 0.0
    for cut in plan.cuts:
        for name, cut_in in cut.own.items():
            parameter = model.get_submodule(cut.module).get_parameter(name)
            share = sum(cut_in.leaving(tp, part) for part in range(tp)) / tp / cut_in.size
            stacks = ep if cut.style == EXPERTS else 1
            sent += share * parameter.numel() * parameter.element_size() / stacks
    return 2 * sent


def token_bytes(
    summed: Iterable[int], gathered: Iterable[int], tp: int, *, scatters: bool = False
) -> float:
    """Return the bytes a rank sends over tp for each token of its batch, forward and backward.

    Args:
        summed: Bytes of what is all-reduced for one token.
        gathered: Bytes of what is all-gathered, whole.
        tp: Ranks that share a weight.
        scatters: With sequence parallel on gloo: all-reduces become reduce-scatters,
            which is an all-reduce there, and an all-gather, so half as much again.
    """
    return (tp - 1) / tp * ((3 if scatters else 2) * sum(summed) + sum(gathered))


def _cut_of(plan: TensorPlan, module: str) -> Cut:
    return next(cut for cut in plan.cuts if cut.module == module)


def _widths(model: "nn.Module", cut: Cut) -> tuple[int, int]:
    """Return the bytes of what a module makes, and takes, for one token."""
    module: Any = layer_of(model.get_submodule(cut.module))
    if cut.style == ATTENTION:
        width = module.embed_dim * module.out_proj.weight.element_size()
        return width, width
    if cut.style == EXPERTS:
        # Of a stack (expert, out, in), or (expert, in, out): what is not cut.
        held = ((module.get_parameter(name), own.dim) for name, own in cut.own.items())
        found = (p.shape[3 - dim] * p.element_size() for p, dim in held if p.dim() == 3)
        width = next(found, 0)
        return width, width
    widths = widths_of(module) or (module.weight.shape[-1], module.weight.shape[0])
    inputs, outputs = (width * module.weight.element_size() for width in widths)
    return outputs, inputs
