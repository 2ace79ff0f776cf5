"""Report over how much a loss is a mean, as autograd has it noted, and what one element counts.

A loss that is a mean over what a mask keeps is divided by each rank's own number. Ranks' gradients
are then averaged, and an element counts more where fewer are kept. Whoever weighs the loss by hand,
or by `layout.step(weight=)`, multiplies it with what makes up for that: so what is reported is both
together, and equal on all ranks where all is well.

Of a root that is anything else nothing is told: of a sum of losses, a mean of all there is, or one
with weights for classes. Main thread, before a backward that is observed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nbdist.engine.compat import torch_graph
from nbdist.engine.compat.torch_graph import other_operand

_DEEPEST = 8  # operations between a root and its mean
_ROUNDING = 1e-2  # of a count in bfloat16, or with a small number that avoids 0
_SAME_BUT_SIGN = frozenset(
    ("ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ViewBackward0", "NegBackward0")
)
_SCALING = frozenset(("MulBackward0", "DivBackward0"))
_PASSED = _SAME_BUT_SIGN | _SCALING

Number = float | Tensor


@dataclass(frozen=True, slots=True)
class MaskedMean:
    """A mean over so many elements, with what it is multiplied with, and divided by."""

    count: Number
    factors: list[Number] = field(default_factory=list)
    divisors: list[Number] = field(default_factory=list)

    def weight(self) -> float:
        """Return what the mean as a whole counts. Waits for a GPU."""
        over = math.prod(map(float, self.divisors))
        return abs(math.prod(map(float, self.factors))) / abs(over) if over else math.nan


class Means:
    """The means that the backwards of one step begin from."""

    def __init__(self) -> None:
        """Begin with none."""
        self._found: list[MaskedMean | None] = []

    def backward_begins(self, root: Any, gradient: Any) -> None:
        """Note a backward's root; `gradient` is what it is called with, None for 1."""
        try:
            mean = masked_mean(root)
        except RuntimeError:  # what autograd has saved is freed, as backward then says itself
            mean = None
        if mean is not None and gradient is not None:
            mean.factors.append(_one_of(gradient))
        self._found.append(mean)

    def take(self) -> dict[str, float]:
        """Return what is known of the step that has ended, and begin anew. Waits for a GPU.

        Returns:
            `counted`, the elements of all its backwards, and `each`, what one of them counts;
            nothing where a backward is of something else.
        """
        found, self._found = self._found, []
        means = [mean for mean in found if mean is not None]
        if not means or len(means) < len(found):
            return {}
        counts, weights = [float(mean.count) for mean in means], [mean.weight() for mean in means]
        if not all(0 < number < math.inf for number in (*counts, *weights)):
            return {}
        return {"counted": sum(counts), "each": sum(weights) / sum(counts)}


def masked_mean(root: Any) -> MaskedMean | None:
    """Return the mean that a loss is; None where it is none over what a mask or a label keeps."""
    mean = MaskedMean(0.0)
    for node in _chain(root):
        name = node.name()
        if name in torch_graph.MEANS_OF_LABELS:
            kept = torch_graph.kept_by_labels(node)
            return None if kept is None else _over(mean, kept)
        if name == "DivBackward0" and (count := _kept_by_mask(node)) is not None:
            return _over(mean, count)
        if name in _SCALING and not _has_two_inputs(node):
            place = mean.factors if name == "MulBackward0" else mean.divisors
            place.append(_one_of(other_operand(node)))
    return None


def _over(mean: MaskedMean, count: Number) -> MaskedMean:
    return MaskedMean(_one_of(count), mean.factors, mean.divisors)


def _chain(root: Any) -> Iterator[Any]:
    """Yield the operations of a root, as long as each is of one tensor with gradients."""
    one = root[0] if isinstance(root, list | tuple) and len(root) == 1 else root
    node = one.grad_fn if type(one) is Tensor else None
    for _ in range(_DEEPEST):
        if node is None:
            return
        yield node
        if node.name() not in _PASSED or _has_two_inputs(node):
            return
        node = next((one for one, _ in node.next_functions if one is not None), None)


def _kept_by_mask(quotient: Any) -> Tensor | None:
    """Return by how much a sum of products with a mask is divided, if that is the mask's own sum.

    Only of a mask of zeros and ones; None of any other quotient.
    """
    total = _below_signs(quotient.next_functions[0][0])
    if total is None or total.name() != "SumBackward0":
        return None
    product = _below_signs(total.next_functions[0][0])
    if product is None or product.name() != "MulBackward0" or _has_two_inputs(product):
        return None
    mask, count = other_operand(product), torch_graph.divisor(quotient)
    if type(mask) is not Tensor or type(count) is not Tensor or count.numel() != 1:
        return None
    mask = mask.detach()
    kept = float(mask.sum())
    if abs(float(count) - kept) > _ROUNDING * kept:
        return None
    is_mask = mask.dtype == torch.bool or torch.equal(mask * mask, mask)
    return count.detach() if is_mask else None


def _below_signs(node: Any) -> Any:
    while node is not None and node.name() in _SAME_BUT_SIGN:
        node = node.next_functions[0][0]
    return node


def _has_two_inputs(node: Any) -> bool:
    return sum(one is not None for one, _ in node.next_functions) > 1


def _one_of(number: Any) -> Number:
    """Return a scalar without its graph; nan of a tensor of several."""
    if isinstance(number, Tensor):
        return number.detach() if number.numel() == 1 else math.nan
    return float(number) if isinstance(number, int | float) else math.nan
