"""Record what the modules of a model return in a step, by name.

A forward that a backward runs again, as of a checkpointed part, is none of the step's.

Main thread.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nbdist.engine.compat import torch_hooks

MOST_BYTES: Final = 1 << 30  # of one model and step; later outputs are not kept


class Outputs:
    """Of one step, or of a part of its batch; none where they are not asked for.

    Attributes:
        tensors: Copies, in the order in which modules ended; of a DTensor this rank's part.
        unkept: How many there were beyond the bound.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self.tensors: dict[str, torch.Tensor] = {}
        self.unkept = 0
        self._calls: Counter[str] = Counter()
        self._bytes = 0
        self._newest: torch.Tensor | None = None

    @contextmanager
    def recording(self, model: nn.Module, elsewhere: Collection[str] = ()) -> Iterator[None]:
        """Record within the block.

        Args:
            model: Of which a step is made.
            elsewhere: Names of its modules that are left out: what they return is made up.
        """
        hooks = [
            module.register_forward_hook(self._hook(name))
            for name, module in (model.named_modules() if self._is_on else ())
            if name not in elsewhere
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._newest = None

    def _hook(self, name: str) -> Any:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            if not torch_hooks.is_in_backward():
                self._note(name, output)

        return note

    def _note(self, name: str, output: Any) -> None:
        self._calls[name] += 1
        found = [one for one in tree_leaves(output) if _is_compared(one)]
        if len(found) == 1 and found[0] is self._newest:
            return  # a module around another that returns what that has returned
        for number, tensor in enumerate(found):
            kept = torch_hooks.local_part(tensor.detach())
            if self._bytes + kept.nbytes > MOST_BYTES:
                self.unkept += 1
                continue
            self._bytes += kept.nbytes
            self.tensors[_named(name, self._calls[name], number, len(found))] = kept.clone()
        self._newest = found[-1] if found else None


def _is_compared(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not leaf.is_sparse


def _named(module: str, call: int, number: int, count: int) -> str:
    """Return a name of a module's output, as `blocks.0 (call 2)[1]`."""
    which = f"[{number}]" if count > 1 else ""
    return (module or "the model") + (f" (call {call})" if call > 1 else "") + which
