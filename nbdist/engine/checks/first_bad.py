"""Find the first module of a forward whose output is not finite, and the samples it is so for.

Hooks that are there for one forward; main thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.compat.torch_sharded import plain_name
from nbdist.engine.steps.forwards import tensors_in
from nbdist.engine.steps.kept_step import plain


@dataclass(frozen=True, slots=True)
class BadOutput:
    """The first output that is not finite.

    Attributes:
        module: Its name in the model, "" for the model itself.
        kind: Its class.
        weights: Names of its own parameters and buffers that are not finite either.
        is_passed_on: Whether what it was called with was not finite.
    """

    module: str
    kind: str
    weights: tuple[str, ...]
    is_passed_on: bool

    def to_plain(self) -> dict[str, Any]:
        """Return it as a dict."""
        return asdict(self) | {"weights": list(self.weights)}


class Looking:
    """What the hooks have seen of one forward.

    Attributes:
        first: None where every output was finite.
        rows: Which of the forward's samples that output, or the first one behind it that has a
            row for each sample, is not finite for; None where no such output was.
    """

    def __init__(self, samples: int) -> None:
        self.first: BadOutput | None = None
        self.rows: list[int] | None = None
        self._samples = samples

    def see(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        """Look at an output."""
        bad = [tensor for tensor in tensors_in(output) if not is_finite(tensor)]
        if not bad:
            return
        if self.first is None:
            own = [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]
            weights = tuple(name for name, tensor in own if not is_finite(tensor))
            is_passed_on = not all(map(is_finite, tensors_in(given)))
            self.first = BadOutput(name, plain_name(module), weights, is_passed_on)
        if self.rows is None:
            self.rows = bad_rows(bad, self._samples)


@contextmanager
def looking(model: nn.Module, samples: int) -> Iterator[Looking]:
    """Look at the output of every module of a model, within the block.

    Args:
        model: It makes one forward there.
        samples: How many that has; 0 where it is not known.
    """
    seen = Looking(samples)

    def hook(name: str) -> Any:
        # Before what gives gathered weights back, and before what joins the parts of ranks.
        def look(module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            seen.see(name, module, (args, keywords), output)

        return look

    hooks = [
        module.register_forward_hook(hook(name), prepend=True, with_kwargs=True)
        for name, module in plain(model).named_modules()
    ]
    try:
        yield seen
    finally:
        for one in hooks:
            one.remove()


def bad_rows(tensors: list[torch.Tensor], samples: int) -> list[int] | None:
    """Return which rows are not finite in any of those that have one for each sample."""
    found: set[int] = set()
    is_known = False
    for tensor in map(local_part, tensors):
        if samples and tensor.dim() and len(tensor) == samples and tensor.numel():
            is_known = True
            rows = tensor.detach().isfinite().reshape(samples, -1).all(dim=1)
            found.update((~rows).nonzero().flatten().tolist())
    return sorted(found) if is_known else None


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers are finite; of a DTensor this rank's."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    local = local_part(tensor.detach())
    values = local._values() if local.is_sparse else local
    return bool(torch.isfinite(values).all())
