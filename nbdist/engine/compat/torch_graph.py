"""Private parts of torch in autograd's graph: what the nodes of a loss have saved.

`check()` says what broke when a version moves. Tried with torch 2.13.0 (CPU).
"""

from typing import Any

import torch
from torch.nn import functional as F

MEANS_OF_LABELS = frozenset(("NllLossBackward0", "NllLoss2DBackward0"))
_MEAN = 1  # as ATen's Reduction has it


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    leaf = torch.ones(1, 2, requires_grad=True)
    loss = F.nll_loss(leaf, torch.tensor([0]))
    try:
        found = kept_by_labels(loss.grad_fn), other_operand((leaf * 3).grad_fn)
    except AttributeError as error:
        return [f"torch {torch.__version__}: {error}"]
    if loss.grad_fn is None or loss.grad_fn.name() not in MEANS_OF_LABELS or found != (1.0, 3):
        return [f"torch {torch.__version__}: the nodes of a loss save something else"]
    return []


def kept_by_labels(node: Any) -> Any:
    """Return over how many labels one of MEANS_OF_LABELS is a mean; None with weights of classes.

    Also None where it is a sum.
    """
    is_plain = node._saved_reduction == _MEAN and node._saved_weight is None
    return node._saved_total_weight if is_plain else None


def other_operand(node: Any) -> Any:
    """Return the operand of a product or quotient that has no gradients."""
    (left, _), *_ = node.next_functions
    return node._saved_other if left is not None else node._saved_self


def divisor(node: Any) -> Any:
    """Return what a quotient is divided by."""
    return node._saved_other
