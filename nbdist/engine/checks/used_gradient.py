"""Notice that a gradient which a step has used goes into the next step: nothing has zeroed it.

It is seen where a backward begins, when loops of any order have zeroed what they zero. Main thread.
"""

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor


class UsedGradient:
    """One gradient of an optimizer, from one of its steps to the next.

    Attributes:
        is_in_next: Whether gradients of the next step are being added to it.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None  # its parameter
        self._known: weakref.ref[Tensor] | None = None
        self._version = 0  # the gradient's: one that is scaled or set is no longer what was used
        self.is_in_next = False

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Begin, when an optimizer of these parameters has stepped; of none: watch nothing."""
        self._of, self.is_in_next = None, False
        found = next((p for p in parameters if p.grad is not None and not p.grad.is_sparse), None)
        if found is not None and found.grad is not None:
            self._of, self._known = weakref.ref(found), weakref.ref(found.grad)
            self._version = found.grad._version

    def backward_begins(self) -> None:
        """Look whether it is there as it was used, or, once added to, whether it still is there."""
        parameter = None if self._of is None else self._of()
        grad = None if parameter is None else parameter.grad
        self.is_in_next = grad is not None and self._is_used(grad) and _has_numbers(grad)
        if not self.is_in_next:
            self._of = None

    def _is_used(self, grad: Tensor) -> bool:
        is_same = self._known is not None and grad is self._known()
        return is_same and (self.is_in_next or grad._version == self._version)


def _has_numbers(gradient: Tensor) -> bool:
    """Return whether any of it is not zero: on a GPU that waits, if nothing has zeroed it."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(local.any())
