"""A step on whole tensors, one after the other, of parameters of which each rank has a part.

A stand-in of the optimizer's class steps in its place. Its `param_groups` are gathered as its step
goes through them: each parameter that is cut comes whole, in a group of its own, with its gradient
and its state; as the step asks for the next one, this rank's part of what has become of it is put
back. So all ranks work out the same, and have two whole parameters at a time.

A state that is shaped like its parameter is cut like it between steps; any other is whole on each
rank, as a DTensor that says so, which checkpoints and recovery understand.

Main thread, on all ranks that have a part, in the same order.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbdist.engine.compat import torch_hooks, torch_shards
from nbdist.engine.layout.weights import full_tensors

_REPLACED = ("param_groups", "state")


def is_cut(parameter: object) -> bool:
    """Return whether each rank has a part of a parameter."""
    return isinstance(parameter, DTensor) and not all(
        placement.is_replicate() for placement in parameter.placements
    )


def stand_in(optimizer: Optimizer) -> Optimizer:
    """Return what steps in the place of an optimizer; give it to `take_over` afterwards."""
    made: Any = object.__new__(torch_hooks.with_quiet_bases(type(optimizer)))
    groups = _InTurns(optimizer)
    vars(made).update(vars(optimizer), param_groups=groups, state=groups.state)
    assert isinstance(made, Optimizer)
    return made


def is_stand_in(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of `stand_in`."""
    return isinstance(getattr(optimizer, "param_groups", None), _InTurns)


def take_over(optimizer: Optimizer, stood_in: Optimizer) -> None:
    """Let an optimizer remember what its stand-in has noted on itself in its step."""
    noted = {name: value for name, value in vars(stood_in).items() if name not in _REPLACED}
    vars(optimizer).update(noted)
    own = {key: one for key, one in stood_in.state.items() if not isinstance(key, Tensor)}
    optimizer.state.update(own)


class _InTurns(Sequence[dict[str, Any]]):
    """The groups of a stand-in; by number, the optimizer's own.

    Attributes:
        state: Of the stand-in.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.state: defaultdict[Any, Any] = defaultdict(dict, optimizer.state)

    def __len__(self) -> int:
        return len(self._optimizer.param_groups)

    def __getitem__(self, number: Any) -> Any:
        return self._optimizer.param_groups[number]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for group in self._optimizer.param_groups:
            yield from self._of(group)

    def _of(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a group in several: what is whole at once, then each that is cut.

        Each comes with the options from before the step, so that one counted in them counts once.
        """
        options = _options(group)
        cut = [p for p in group["params"] if is_cut(p) and p.grad is not None]
        ids = set(map(id, cut))
        others = [p for p in group["params"] if id(p) not in ids]
        given = {**options, "params": others}
        if others or not cut:
            yield given
            self._optimizer.state.update({p: self.state[p] for p in others if p in self.state})
        for parameter in cut:
            whole = self._whole(parameter)
            given = {**options, "params": [whole]}
            yield given
            self._put_back(parameter, whole)
        group.update(_options(given))

    def _whole(self, parameter: DTensor) -> nn.Parameter:
        whole = nn.Parameter(full_tensors.whole_of(parameter), parameter.requires_grad)
        vars(whole).update(vars(parameter))  # such as a mark that an optimizer looks for
        assert parameter.grad is not None, "only such parameters are gathered"
        whole.grad = full_tensors.whole_of(parameter.grad)
        state = self._optimizer.state.get(parameter, {})
        self.state[whole] = {
            name: full_tensors.whole_of(one) if isinstance(one, DTensor) else one
            for name, one in state.items()
        }
        return whole

    def _put_back(self, parameter: DTensor, whole: nn.Parameter) -> None:
        full_tensors.put(parameter, whole.detach())
        before = self._optimizer.state.get(parameter, {})
        self._optimizer.state[parameter] = {
            name: _kept(one, parameter, before.get(name)) if isinstance(one, Tensor) else one
            for name, one in self.state.pop(whole).items()
        }


@torch.no_grad()
def _kept(state: Tensor, parameter: DTensor, before: Any) -> Tensor:
    """Return a state as it is between steps: in the tensor that it was in `before`, if in any."""
    if isinstance(before, DTensor) and (before.shape, before.dtype) == (state.shape, state.dtype):
        full_tensors.put(before, state)
        return before
    if state.shape == parameter.shape:
        return full_tensors.cut_like(state, parameter).clone()  # without the memory of the whole
    return torch_shards.on_each(state, parameter) if state.numel() > 1 else state


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
