"""Read the whole state of a unit on this rank, and put such a state back in place.

A state is a frame (nested plain values, with a `TensorPlace` where a tensor stands) and the
tensors. Put back, values are copied into the tensors that are there: no object is replaced that
anyone holds. Optimizers are found by their names (`identity`): what only one side has stays as it
is. What follows the steps beside them is `follow`'s.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.engine.compat import torch_quantized
from nbdist.engine.recovery.wrapped_models import Unit, local, parameters_of
from nbdist.engine.steps.optimizer_options import options_of, put_options
from nbdist.engine.steps.optimizer_wrapper import ApartWrapper


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor stands in a frame."""

    number: int


def read(unit: Unit, *, buffers: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return the unit's state now: the frame, and the live tensors themselves.

    Args:
        unit: Whose state.
        buffers: With the buffers of its modules.
    """
    tensors: list[torch.Tensor] = []
    frame = {
        "parameters": _take(list(unit.parameters), tensors),
        "buffers": _take(list(unit.buffers.values()), tensors) if buffers else None,
        "optimizers": {
            part: [_take(optimizer.state.get(p), tensors) for p in parameters_of(optimizer)]
            for part, optimizer in _real(unit)
        },
        "wrappers": [_take(wrapper.own_state(), tensors) for wrapper in _wrappers(unit)],
        "options": None,
    }
    return frame, tensors


def read_weights(unit: Unit) -> list[torch.Tensor]:
    """Return the live tensors with which those of `read` begin: the parameters."""
    tensors: list[torch.Tensor] = []
    _take(list(unit.parameters), tensors)
    return tensors


def read_options(unit: Unit) -> dict[str, Any]:
    """Return the options of the unit's optimizers: learning rates, and what else a group holds.

    A scheduler steps after the optimizer: at a boundary it is too early to read them.
    """
    return {part: options_of(optimizer) for part, optimizer in _ruling(unit)}


@torch.no_grad()
def put_back(
    unit: Unit,
    frame: dict[str, Any],
    tensors: list[torch.Tensor],
    only: Container[str] | None = None,
) -> None:
    """Give the unit a state that was read here, or on a rank that holds the same model.

    Args:
        unit: Whose state becomes this.
        frame: As `read` returned it.
        tensors: Those of the frame.
        only: The names of the optimizers that get theirs; all by itself.
    """
    for parameter, slot in zip(unit.parameters, frame["parameters"], strict=True):
        _fill(slot, parameter, tensors)
    if frame["buffers"] is not None:
        for buffer, slot in zip(unit.buffers.values(), frame["buffers"], strict=True):
            _fill(slot, buffer, tensors)
    for optimizer, states in _meet(_real(unit), frame["optimizers"], only):
        for parameter, state in zip(parameters_of(optimizer), states, strict=True):
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = _fill(state, optimizer.state.get(parameter), tensors)
    for wrapper, saved in zip(_wrappers(unit), frame["wrappers"], strict=False):
        wrapper.load_own_state(_fill(saved, wrapper.own_state(), tensors))
    if frame["options"] is not None:
        put_back_options(unit, frame["options"], only)


def put_back_options(
    unit: Unit, options: dict[str, Any], only: Container[str] | None = None
) -> None:
    """Give the unit what `read_options` returned, here or on another rank; see `put_back`."""
    for optimizer, groups in _meet(_ruling(unit), options, only):
        put_options(optimizer, groups)


def _meet(
    live: Iterable[tuple[str, Any]], saved: Mapping[str, Any], only: Container[str] | None
) -> list[tuple[Any, Any]]:
    """Return what lives here with what was saved under the same name."""
    return [
        (one, saved[part]) for part, one in live if part in saved and (only is None or part in only)
    ]


def _real(unit: Unit) -> list[tuple[str, torch.optim.Optimizer]]:
    """Return the optimizers that hold state, by name: the one inside a ZeroRedundancyOptimizer."""
    real = [getattr(optimizer, "optim", optimizer) for optimizer in unit.optimizers]
    return list(zip(unit.parts, real, strict=False))


def _ruling(unit: Unit) -> list[tuple[str, torch.optim.Optimizer]]:
    """Return the optimizers whose options count, by name.

    A ZeroRedundancyOptimizer gives its own, which schedulers write, to the one inside at each step.
    """
    if unit.is_cut_in_states_only:
        return list(zip(unit.parts, unit.optimizers, strict=False))
    return _real(unit)


def _wrappers(unit: Unit) -> list[ApartWrapper]:
    """Return the optimizers around others, which remember something of their own."""
    return [optimizer for optimizer in unit.optimizers if isinstance(optimizer, ApartWrapper)]


def _take(value: Any, tensors: list[torch.Tensor]) -> Any:
    if torch_quantized.is_quantized(value):
        return [_take(part, tensors) for part in torch_quantized.plain(value)]
    if isinstance(value, torch.Tensor):
        tensors.append(local(value).detach())
        return TensorPlace(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _take(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take(item, tensors) for item in value)
    return value


def _fill(saved: Any, live: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(saved, TensorPlace):
        tensor = tensors[saved.number]
        if isinstance(live, torch.Tensor) and local(live).shape == tensor.shape:
            local(live).detach().copy_(tensor)
            return live
        return tensor.clone()
    if torch_quantized.is_quantized(live):
        for place, part in zip(saved, torch_quantized.plain(live), strict=True):
            _fill(place, part, tensors)
        return live
    if isinstance(saved, dict):
        live = live if isinstance(live, dict) else {}
        for key in set(live) - set(saved):
            del live[key]
        for key, item in saved.items():
            live[key] = _fill(item, live.get(key), tensors)
        return live
    if type(saved) in (list, tuple):
        there = live if isinstance(live, list | tuple) and len(live) == len(saved) else ()
        pairs = zip(saved, there or [None] * len(saved), strict=True)
        return type(saved)(_fill(item, other, tensors) for item, other in pairs)
    return saved
