"""Follow what projections make, feature by feature, through the operations of a forward.

A feature is followed while each of what an operation makes depends on the same feature of what it
takes: then a rank that has some features of a tensor makes the same features of the next. That is
known of elementwise operations, by torch's own tag, of those that move or name dims anew, and of
products and means over other dims. Any other operation ends it, and is named.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbdist.engine.layout.plan.projection import widths_of

_aten = torch.ops.aten
# Elementwise, or of a shape that follows the first tensor's, without torch's tag.
_ELEMENTWISE = (
    *(_aten._to_copy, _aten.detach, _aten.alias, _aten._prelu_kernel, _aten.native_dropout),
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.rand_like, _aten.bernoulli_),
)


@dataclass(frozen=True, slots=True)
class Features:
    """The dim of a tensor that lies as the features that some modules make.

    Attributes:
        makers: Names of the modules, of which each feature depends on the same feature.
        dim: Counted from the end: -1 is the last.
    """

    makers: frozenset[str]
    dim: int


class FeatureFlow(TorchDispatchMode):
    """Watches a forward on fake tensors, which it keeps.

    Attributes:
        mixed: What ends the way of what a module makes, in words, by the module's name.
        takers: Names of the projections that take it, by the same; "" is who called the model.
    """

    # What torch runs as one, such as flex attention: an operation without a rule.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mixed: dict[str, str] = {}
        self.takers: dict[str, set[str]] = {}
        self._known: dict[int, tuple[Tensor, Features]] = {}
        self._inside = 0  # of projections: what they make is said when they end

    def features_of(self, value: object) -> Features | None:
        """Return what is known of a tensor."""
        _, features = self._known.get(id(value), (None, None))
        return features

    def enter(self, name: str, layer: nn.Module, given: Any) -> None:
        """Note a projection's call: it takes all features, or ends their way."""
        self._inside += 1
        features = self.features_of(given)
        if features is not None:
            taken = widths_of(layer)
            if features.dim != -1 or taken is None or given.shape[-1] != taken[0]:
                self._end(features.makers, f"{name} takes it along another dim")
            self._take(features.makers, name)

    def leave(self, name: str, made: Any) -> None:
        """Begin the way of what a projection has made."""
        self._inside -= 1
        if isinstance(made, Tensor):
            self._known[id(made)] = made, Features(frozenset((name,)), -1)

    def end(self, returned: Any) -> None:
        """Note what a model returns: all of it is needed there."""
        leaves = tree_leaves(returned)
        for value in [*leaves, *(part for leaf in leaves for part in _parts_of(leaf))]:
            if (features := self.features_of(value)) is not None:
                self._take(features.makers, "")

    def taker_of(self, name: str) -> str:
        """Return the projection that alone takes what a module makes; empty where none does."""
        takers = self.takers.get(name, set())
        return next(iter(takers)) if len(takers) == 1 and name not in self.mixed else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = {id(t): f for t in given if (f := self.features_of(t)) is not None}
        if known and not self._inside:
            makers = frozenset().union(*(features.makers for features in known.values()))
            for output in tree_leaves(made):
                if isinstance(output, Tensor):
                    dim = _dim_after(func, args, given, known, output)
                    if dim is None:
                        self._end(makers, f"goes through {_name(func)}")
                        break
                    self._known[id(output)] = output, Features(makers, dim - output.dim())
        return made

    def _take(self, makers: frozenset[str], by: str) -> None:
        for maker in makers:
            self.takers.setdefault(maker, set()).add(by)

    def _end(self, makers: frozenset[str], why: str) -> None:
        for maker in makers:
            self.mixed.setdefault(maker, why)


def _parts_of(value: object) -> list[Any]:
    """Return what an object of a class of the user's holds, such as a dataclass."""
    return [] if isinstance(value, Tensor) else tree_leaves(getattr(value, "__dict__", {}))


def _name(func: Any) -> str:
    return str(getattr(getattr(func, "overloadpacket", func), "__name__", func))


def _dim_after(
    func: Any, args: Any, given: list[Tensor], known: dict[int, Features], output: Tensor
) -> int | None:
    """Return the dim of the features in what an operation makes; None where they are mixed."""
    packet = getattr(func, "overloadpacket", func)
    if torch.Tag.pointwise in getattr(func, "tags", ()) or packet in _ELEMENTWISE:
        return _aligned(given, known, output)
    if packet in (_aten.mm, _aten.bmm):
        return _of_product(known.get(id(args[0])), known.get(id(args[1])), output)
    rule, first = _RULES.get(packet), known.get(id(args[0])) if args else None
    if rule is None or first is None or len(known) > 1:
        return None
    dim: int = args[0].dim() + first.dim
    return rule(dim, args, output)


def _aligned(given: list[Tensor], known: dict[int, Features], output: Tensor) -> int | None:
    """Return the dim where all have the features there, or one number for all of them."""
    dim, *others = {features.dim for features in known.values()}
    # What else has a number for each feature is no rank's part.
    rest = [t for t in given if id(t) not in known and t.dim() >= -dim]
    sizes = {t.shape[dim] for t in given if id(t) in known and not others}
    if len(sizes) != 1 or any(t.shape[dim] != 1 for t in rest) or output.dim() < -dim:
        return None
    return output.dim() + dim


def _of_product(left: Features | None, right: Features | None, output: Tensor) -> int | None:
    """Return the dim in a product of matrices, over which nothing is summed."""
    if left is None and right is not None and right.dim == -1:
        return output.dim() - 1
    return output.dim() - 2 if right is None and left is not None and left.dim == -2 else None


def _viewed(dim: int, args: Any, output: Tensor) -> int | None:
    """Return where a view has the dim: whole, or with what lay behind it folded in."""
    given = args[0].shape
    for place, size in enumerate(output.shape):
        is_there = math.prod(output.shape[:place]) == math.prod(given[:dim])
        if is_there and size and size % given[dim] == 0:
            return place
    return None


def _permuted(dim: int, args: Any, output: Tensor) -> int | None:
    order = list(range(output.dim()))
    if len(args) > 1 and isinstance(args[1], list):
        order = [place % output.dim() for place in args[1]]
    else:
        first, second = args[1:] or (0, -1)
        order[first], order[second] = order[second], order[first]
    return order.index(dim)


def _expanded(dim: int, args: Any, output: Tensor) -> int | None:
    added: int = output.dim() - args[0].dim()
    return dim + added


def _over_others(dim: int, args: Any, output: Tensor) -> int | None:
    """Return the dim where an operation works over other dims, and keeps or removes them."""
    over = args[1] if len(args) > 1 else 0
    if over is None or over == [] or output.dim() == 0:
        return None
    gone = {place % args[0].dim() for place in (over if isinstance(over, list) else [over])}
    if dim in gone:
        return None
    kept = output.dim() == args[0].dim()
    return dim if kept else dim - sum(place < dim for place in gone)


def _split(dim: int, args: Any, output: Tensor) -> int | None:
    return _over_others(dim, (args[0], *args[2:]), output)


Rule = Callable[[int, Any, Tensor], int | None]
_RULES: dict[Any, Rule] = {
    **dict.fromkeys((_aten.view, _aten._unsafe_view, _aten.unsqueeze, _aten.squeeze), _viewed),
    **dict.fromkeys((_aten.transpose, _aten.permute, _aten.t), _permuted),
    **dict.fromkeys((_aten.mean, _aten.sum, _aten.amax, _aten.select, _aten.slice), _over_others),
    **dict.fromkeys((_aten._softmax, _aten.cumsum, _aten.index_select), _over_others),
    **dict.fromkeys((_aten.split, _aten.split_with_sizes), _split),
    _aten.expand: _expanded,
}
