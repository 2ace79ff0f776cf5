"""Read a plan of words, ours and those of transformers, by names of modules and of parameters.

A parameter is named where a module holds several weights of its own, as experts do in a stack.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from nbdist.engine.layout.axes.tp.cuts import (
    COLUMN,
    EXPERTS,
    GATHER,
    HEAD,
    PACKED,
    ROW,
    SPLIT,
    SUMMED,
    VOCAB,
    WORDS,
    Cut,
    TensorPlan,
)
from nbdist.engine.layout.axes.tp.sections import Sections, equal, one
from nbdist.engine.layout.plan.adapted import layer_in
from nbdist.engine.layout.plan.blocks import find_blocks
from nbdist.shared.errors import LayoutError

# transformers' words for what we do, in its releases 4 and 5.
THEIR_WORDS = {
    "colwise": COLUMN,
    "rowwise": ROW,
    "colwise_rep": GATHER,
    "colwise_gather_output": GATHER,
    "rowwise_rep": SPLIT,
    "rowwise_split_input": SPLIT,
    "embedding_rowwise": VOCAB,
    "replicated_with_grad_allreduce": SUMMED,
    "packed_colwise": PACKED,
    "moe_tp_experts": EXPERTS,
}
_WHOLE = ("replicate", "replicated")
_PACKED_ROWS = "packed_rowwise"  # of parameters alone
_HALVES = 2  # what they pack is a gate and what it lets through


def read(
    model: nn.Module, words: Mapping[str, Any], source: str, why: str, *, may_lack: bool = False
) -> TensorPlan:
    """Return the plan that words say.

    Args:
        model: Not changed.
        words: By names of modules or parameters.
        source: Whose plan it is, for people.
        why: Why a module is cut, for people.
        may_lack: Whether a key may name nothing: a class's plan is for all of its sizes.

    Raises:
        LayoutError: A key names nothing, or a word is none that we know.
    """
    modules = dict(model.named_modules())
    blocks = tuple(f"{name}." for name in find_blocks(model))
    styles: dict[str, Any] = {}
    own: dict[str, dict[str, Sections]] = {}
    for key, word in words.items():
        found = [name for name in modules if _matches(name, key)]
        held = [] if found else list(_parameters(modules, key))
        if not found and not held:
            if may_lack:
                continue
            raise LayoutError(
                f'No module is called "{key}", which {source} for tp names.',
                do="use names of model.named_modules(), with * for one part of a name",
            )
        for module, name, parameter in held:
            own.setdefault(module, {}).update(_own(key, word, name, parameter))
        style = _style(key, word) if found else None
        for name in found if style is not None else ():
            at_end = style == GATHER and word != GATHER and not name.startswith(blocks)
            styles[name] = HEAD if at_end else style
    _check_owners(modules, own, styles)
    cuts = (Cut(n, styles[n], why, own.get(n, {})) for n in modules if n in styles)
    return TensorPlan(source, tuple(cuts))


def _matches(name: str, key: str) -> bool:
    """Return whether `*` in a key, which stands for one part of a name, makes them the same."""
    parts, wanted = name.split("."), key.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _parameters(modules: Mapping[str, nn.Module], key: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the parameters that a key names: their module, name, and themselves."""
    for name, module in modules.items():
        for own, parameter in module._parameters.items():
            if parameter is not None and _matches(f"{name}.{own}", key):
                yield name, own, parameter


def _own(key: str, word: Any, name: str, parameter: nn.Parameter) -> dict[str, Sections]:
    """Return how a parameter is cut: a weight lies (..., out, in), what has one dim (out)."""
    style = PACKED if word == _PACKED_ROWS else _style(key, word)
    if style is None or (parameter.dim() == 1 and (style == ROW or word == _PACKED_ROWS)):
        return {}
    along_inputs = style == ROW or word == _PACKED_ROWS
    dim = parameter.dim() - 1 if along_inputs else max(parameter.dim() - 2, 0)
    size = parameter.shape[dim]
    if style not in (COLUMN, ROW, PACKED):
        raise LayoutError(
            f'{key} is a parameter, and cannot be cut as "{word}".',
            do="give a plan that names its module: TensorParallel(plan={...})",
        )
    return {name: equal(dim, size, _HALVES) if style == PACKED else one(dim, size)}


def _style(key: str, word: Any) -> Any:
    if isinstance(word, ParallelStyle) or word in WORDS:
        return word
    if word in THEIR_WORDS:
        return THEIR_WORDS[word]
    if word in _WHOLE:
        return None
    raise LayoutError(
        f'"{word}", which the plan for tp says of {key}, is not a known way to cut.',
        why=f"it has {', '.join(WORDS)}, and takes styles of torch.distributed.tensor.parallel",
        do="give a plan with these: TensorParallel(plan={...})",
    )


def _check_owners(
    modules: Mapping[str, nn.Module], own: Mapping[str, object], styles: Mapping[str, Any]
) -> None:
    """Refuse parameters that are cut in a module of which nothing says what to do at its ends.

    Raises:
        LayoutError: There are some, or experts without.
    """
    experts = {name for name, style in styles.items() if style == EXPERTS}
    for name in sorted(own.keys() ^ experts):
        if layer_in(modules[name]) is not None:
            raise LayoutError(
                f"{name} has an adapter, and tp cannot cut the experts in it.",
                why="its numbers are for parameters in a stack (target_parameters), which the "
                "plan for tp names without it",
                do='put adapters on Linear layers (target_modules=["q_proj", "v_proj"]), or use '
                '"zero3"',
            )
        lacks = "that it holds experts" if name in own else "how its parameters are cut"
        raise LayoutError(
            f"The plan for tp does not say of {name} {lacks}.",
            why='of a module\'s own parameters tp cuts those of "moe_tp_experts", whose outputs '
            "are summed",
            do="give a plan of your own: TensorParallel(plan={...})",
        )
