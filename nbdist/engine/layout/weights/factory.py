"""Build a model from a factory without every rank holding the whole of it.

Rank 0 builds it for real, on the CPU, with the initialisation that it has anyway. Other ranks run
the same code, and each parameter goes to the meta device as soon as a module gets it, before it is
filled: so they never have more of it than one parameter. Buffers and plain tensors are real on all
ranks, for code may read them while it builds (`linspace(...).tolist()` for rates of dropout).

With only shards, weights then go from rank 0 into the ranks' shards, one at a time. Other axes
prove their plans on the whole model first, and so every rank makes room for it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from nbdist.engine.compat import torch_quantized
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.weights import full_tensors, meta_copy
from nbdist.engine.layout.weights.full_tensors import TensorFacts
from nbdist.shared.errors import LayoutError

_SOURCE = 0  # the rank that has the weights

Weights = dict[str, torch.Tensor]  # by name; empty but on rank 0


class WeightSource(Protocol):
    """The source of the weights of a model on meta, while it is spread. On all ranks."""

    def planning(
        self, model: nn.Module, shape: MeshShape, device_type: str
    ) -> AbstractContextManager[None]:
        """Have numbers in the model, as far as axes prove their plans with some. Collective."""

    def fill(self, model: nn.Module, shape: MeshShape, device_type: str, *, shared: bool) -> None:
        """Allocate and fill tensors that are still on meta, before or after `Axis.share`.

        Collective. Does so once: where gradients are averaged by a reducer, which needs room,
        before; otherwise after, when ranks have only their parts.
        """


class FromRank0:
    """Weights of a model that was built on rank 0.

    Args:
        weights: By name; empty on other ranks.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @contextmanager
    def planning(self, model: nn.Module, shape: MeshShape, device_type: str) -> Iterator[None]:
        """Fill the whole model on every rank, unless only shards are made."""
        if not is_thin(shape):
            meta_copy.materialise(model, device_type)
            fill(model, self._weights, device_type)
        yield

    def fill(self, model: nn.Module, shape: MeshShape, device_type: str, *, shared: bool) -> None:
        """Fill shards."""
        if shared and is_thin(shape):
            fill(model, self._weights, device_type)


def build(factory: Callable[[], Any], *, with_weights: bool = True) -> tuple[nn.Module, Weights]:
    """Return a model with its parameters on meta, and rank 0's weights. Collective.

    Random numbers continue as if every rank had built all of it; without weights, as if none had.

    Raises:
        LayoutError: The factory failed on a rank, or made something else.
    """
    before = torch.get_rng_state()
    model: Any = None
    failed: Exception | None = None
    weights: Weights = {}
    try:
        if with_weights and dist.get_rank() == _SOURCE:
            model = factory()
        else:
            with _without_weights():
                model = factory()
        if isinstance(model, nn.Module):
            if with_weights and dist.get_rank() == _SOURCE:
                named = {name: p.detach() for name, p in model.named_parameters()}
                weights = torch_quantized.parts(named)
            meta_copy.take_weights(model)
    except Exception as error:
        failed = error
    _agree(model, failed, with_weights)
    if with_weights:
        _synchronize_draws(before)
    else:
        torch.set_rng_state(before)
    return model, weights


def is_thin(shape: MeshShape) -> bool:
    """Return whether weights can go from rank 0 into shards, with no rank having room for all."""
    return shape.fsdp > 1 and not shape.changes_forward


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, torch.Tensor], device_type: str) -> None:
    """Give parameters on meta room, of this rank's parts, and rank 0's weights. Collective."""
    if any(p.is_meta for p in model.parameters()):
        room = torch_quantized.empty_like
        model._apply(lambda t: room(t, device_type) if t.is_meta else t)
    held = torch_quantized.parts(dict(model.named_parameters()))
    wanted = {name: TensorFacts(p.shape, p.dtype) for name, p in held.items()}
    for name, full in full_tensors.from_rank_0(wanted, weights, device_type):
        full_tensors.put(held[name], full)


@contextmanager
def _without_weights() -> Iterator[None]:
    """Drop the weights of modules built here. Main thread: the hook is torch's."""

    def on_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or nn.parameter.is_lazy(parameter):
            return None
        return meta_copy.on_meta(parameter)

    # What it returns takes the parameter's place; its type in torch does not say so.
    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _agree(model: Any, failed: Exception | None, with_weights: bool) -> None:
    """Raise on every rank when one has no model.

    Raises:
        LayoutError: With what has happened, and where.
    """
    problem = None
    if failed is not None:
        problem = f"{type(failed).__name__}: {(str(failed).splitlines() or [''])[0]}"
    elif not isinstance(model, nn.Module):
        problem = f"it returned a {type(model).__name__}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    rank = next((rank for rank, text in enumerate(everyone) if text is not None), None)
    if rank is not None:
        who = f"ranks other than {_SOURCE}" if with_weights else "ranks"
        raise LayoutError(
            f"The factory made no model on rank {rank}: {everyone[rank]}.",
            why=f"{who} build it without weights, which code that reads weights while it builds "
            "cannot do"
            if rank != _SOURCE or not with_weights
            else "",
            do="give a function that returns a torch.nn.Module, such as lambda: Model(config)",
        ) from failed


def _synchronize_draws(before: torch.Tensor) -> None:
    """Continue rank 0's random numbers on ranks that drew the same before the model was built."""
    states: list[Any] = [(before, torch.get_rng_state())]
    dist.broadcast_object_list(states, src=_SOURCE)
    there_before, there_after = states[0]
    if torch.equal(before, there_before):
        torch.set_rng_state(there_after)
