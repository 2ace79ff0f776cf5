"""Copy what an optimizer remembers of its parameters, and let it step from such a copy again.

Of a ZeroRedundancyOptimizer that is the optimizer inside, which holds this rank's part. Main
thread.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbdist.engine.compat import torch_shards
from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.steps import defer_interrupt
from nbdist.engine.steps.optimizer_options import options_of, put_options

Optimizer = torch.optim.Optimizer

_PLAIN = (type(None), bool, int, float, complex, str)


@dataclass(frozen=True, slots=True)
class States:
    """Copies of what this rank holds of an optimizer's state, on the CPU.

    Attributes:
        entries: By parameter, in the order of its groups: by name a plain value, or of a tensor
            `[number of its copy, type of its device, "cut" as its parameter, "whole" on each rank
            of the parameter's mesh, or "" of a plain tensor]`; None without any.
        copies: Of the tensors.
    """

    entries: list[dict[str, Any] | None]
    copies: list[torch.Tensor]

    @classmethod
    def of(cls, optimizer: Optimizer, used_again: Sequence[torch.Tensor] = ()) -> "States":
        """Return the state now; the memory of older copies is used again where they fit.

        Raises:
            TypeError: It holds something else than tensors and plain values, which the text names.
        """
        tensors: list[torch.Tensor] = []
        entries = [_entry_of(state, tensors, like) for like, state in _held_by(optimizer)]
        return cls(entries, host_copies(tensors, used_again))

    def fit(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer still has such parameters."""
        parameters = [parameter for parameter, _ in _held_by(optimizer)]
        return len(parameters) == len(self.entries) and all(
            self.copies[value[0]].shape == local_part(parameter).shape
            for parameter, entry in zip(parameters, self.entries, strict=True)
            for value in (entry or {}).values()
            if isinstance(value, list) and value[2] == "cut"
        )

    def put_into(self, optimizer: Optimizer) -> None:
        """Let the optimizer remember this and nothing else."""
        real = inside(optimizer)
        real.state.clear()
        for (parameter, _), entry in zip(_held_by(optimizer), self.entries, strict=True):
            if entry is not None:
                made = {name: self._made(value, parameter) for name, value in entry.items()}
                real.state[parameter] = made

    def _made(self, value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, list):
            return value
        number, device, held = value
        copy = self.copies[number]
        if held == "cut":
            made = torch.empty_like(parameter.detach(), dtype=copy.dtype)
            local_part(made).copy_(copy)
            return made
        place = parameter.device if device == parameter.device.type else torch.device(device)
        made = copy.to(place, copy=True)
        return torch_shards.on_each(made, parameter) if held == "whole" else made


def inside(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the state: of a ZeroRedundancyOptimizer the one inside."""
    real: Optimizer = getattr(optimizer, "optim", optimizer)
    return real


def bytes_of_state(optimizer: Optimizer) -> int:
    """Return the bytes of what this rank holds of an optimizer's state."""
    return sum(
        local_part(value).nbytes
        for _, state in _held_by(optimizer)
        for value in (state or {}).values()
        if isinstance(value, torch.Tensor)
    )


@contextmanager
def unharmed(optimizer: Optimizer) -> Iterator[None]:
    """Put back what an optimizer remembers, the same tensors, and the options of its groups.

    Within the block it has another state (`States.put_into`), of which it may change all. An
    interrupt waits until all is back.
    """
    both = {id(one): one for one in (optimizer, inside(optimizer))}.values()
    options = [options_of(one) for one in both]
    state = dict(inside(optimizer).state)
    try:
        yield
    finally:
        defer_interrupt.here.begin()
        try:
            inside(optimizer).state.clear()
            inside(optimizer).state.update(state)
            for one, before in zip(both, options, strict=True):
                with torch.no_grad():
                    put_options(one, before)
        finally:
            defer_interrupt.here.end()


def host_copies(
    tensors: Iterable[torch.Tensor], used_again: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Return copies on the CPU of what this rank holds of tensors.

    From a GPU they go into pinned memory, and nothing waits for them: what reads them on the host
    has to. `used_again` are older copies, whose memory is taken where shapes are the same.
    """
    made = []
    for number, tensor in enumerate(tensors):
        local = local_part(tensor.detach())
        if type(local) is not torch.Tensor or local.layout != torch.strided:
            made.append(local.to("cpu", copy=True))  # of a library's own class
            continue
        into = used_again[number] if number < len(used_again) else None
        if into is None or into.shape != local.shape or into.dtype != local.dtype:
            into = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        made.append(into.copy_(local, non_blocking=True))
    return made


def _held_by(optimizer: Optimizer) -> list[tuple[torch.Tensor, Mapping[str, Any] | None]]:
    real = inside(optimizer)
    return [(p, real.state.get(p)) for group in real.param_groups for p in group["params"]]


def _held(state: torch.Tensor, parameter: torch.Tensor) -> str:
    if not isinstance(state, DTensor):
        return ""
    return "cut" if state.shape == parameter.shape else "whole"


def _entry_of(
    state: Mapping[str, Any] | None, tensors: list[torch.Tensor], parameter: torch.Tensor
) -> dict[str, Any] | None:
    if not state:
        return None
    entry: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            entry[name] = [len(tensors), value.device.type, _held(value, parameter)]
            tensors.append(value)
        elif type(value) in _PLAIN:
            entry[name] = value
        else:
            raise TypeError(f"a {type(value).__name__}")
    return entry
