"""The `fsdp` axis: parameters, gradients and optimizer states cut into shards (FSDP2).

Each block is one unit, gathered for its forward and its backward; the rest (embeddings, head)
is the root's unit. With a `dp` axis beside it the mesh is 2-D: shards inside, replicas outside.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from nbdist.engine.compat import torch_hooks, torch_quantized, torch_sharded
from nbdist.engine.layout.axes import outside_calls
from nbdist.engine.layout.axes.axis import Axis, Spreading
from nbdist.engine.layout.plan import device_mesh
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies import offload, precision
from nbdist.engine.layout.policies.efficiency import Precision
from nbdist.shared.errors import LayoutError


class ShardAxis(Axis):
    """Shards of parameters, gradients and optimizer states."""

    name = "fsdp"
    _blocks: tuple[str, ...] = ()

    def check(self, model: nn.Module) -> None:
        """Refuse models that FSDP cannot train, or would train wrongly in silence.

        Raises:
            LayoutError: The model is a bare list, or has a parameter that is a scalar, has hooks or
                cannot be cut.
        """
        if isinstance(model, nn.ModuleList | nn.ModuleDict):
            raise LayoutError(
                f"A {type(model).__name__} has no forward, and fsdp gathers parameters around one.",
                do="parallelize the module whose forward calls the list's elements",
            )
        scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
        if scalars:
            raise LayoutError(
                f"Parameter {scalars[0]} is a scalar, which fsdp cannot cut into shards.",
                do="make it a tensor of one element, torch.zeros(1), or use ddp",
            )
        hooked = [name for name, p in model.named_parameters() if torch_sharded.has_hooks(p)]
        if hooked:
            raise LayoutError(
                f"Parameter {hooked[0]} has a hook, which fsdp would leave behind with the whole.",
                do="register it after parallelize, by p.register_post_accumulate_grad_hook",
            )
        for name, parameter in model.named_parameters():
            stays_whole = torch_quantized.stays_whole(parameter)
            if torch_quantized.is_quantized(parameter) and not stays_whole:
                _check_cuts(name, parameter.detach())

    def share(self, work: Spreading) -> None:
        """Make shards of what this rank holds."""
        self._blocks = tuple(work.blocks)
        apply(
            work.model,
            work.blocks.values(),
            device_mesh.averaging(work.mesh, work.shape),
            # A stage's micro-batches follow each other: its weights stay until the last backward.
            reshard_after_forward=work.shape.gathers_twice,
            in_precision=work.policies.precision,
            offloaded=offload.for_units(work.policies.offload),
        )
        if work.shape.pp == 1:
            outside_calls.watch(work.model, work.blocks)

    def summary(self, shape: MeshShape) -> str:
        """Return the units that are gathered one by one."""
        blocks = self._blocks
        if not blocks:
            return "no repeated blocks found: the whole model is gathered at once"
        shown = ", ".join(blocks[:4]) + (", ..." if len(blocks) > 4 else "")
        return f"gathered one by one: {len(blocks)} blocks ({shown}), then the rest"


def _check_cuts(name: str, quantized: torch.Tensor) -> None:
    """Refuse a tensor of a library's own class (torchao's) that does not let itself be cut."""
    try:
        torch.chunk(quantized, 2)
    except NotImplementedError as error:
        raise LayoutError(
            f"Parameter {name} is a {type(quantized).__name__}, which fsdp cannot cut into shards.",
            why=f"{str(error).splitlines()[0][:160]}",
            do='use "ddp", where each rank holds all of it; or freeze it',
        ) from error


def apply(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    in_precision: Precision,
    offloaded: OffloadPolicy,
) -> None:
    """Shard `model` over the mesh: `fsdp`, or `dp` x `fsdp`.

    Args:
        model: On its device, with the same weights on every rank.
        blocks: Its units, beside the root's.
        mesh: 1-D, or 2-D with replicas outermost.
        reshard_after_forward: True is ZeRO-3: blocks give their gathered parameters back after
            forward and gather them again in backward. The root keeps its own, for backward
            begins with them (torch's default). False keeps all: ZeRO-2's traffic. After a
            forward without gradients, which no backward follows, all are given back.
        in_precision: The precision in which units are gathered, compute, and average.
        offloaded: The memory of their shards between uses.
    """
    precision.keep_statistics(model, in_precision)
    model.register_forward_hook(_own_outputs)  # before fully_shard, whose hook looks at them
    units = precision.for_units(in_precision)
    whole = {p for p in model.parameters() if torch_quantized.stays_whole(p)}
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=units,
            offload_policy=offloaded,
            ignored_params=whole,
        )
    fully_shard(
        model,
        mesh=mesh,
        reshard_after_forward=None if reshard_after_forward else False,
        mp_policy=precision.for_root(in_precision),
        offload_policy=offloaded,
        ignored_params=whole,
    )
    model.register_forward_hook(_give_back)  # after fully_shard's own


def _give_back(model: nn.Module, _args: object, _outputs: object) -> None:
    """Free the parameters that a forward without gradients has gathered.

    torch keeps it for a backward, and an optimizer made meanwhile would hold it in the place of
    shards. What a forward with gradients keeps, which no backward follows, `Gathered` frees.
    """
    if not torch.is_grad_enabled():
        torch_sharded.reshard(model)


class Gathered:
    """What forwards have gathered and no backward has freed: an optimizer's step makes it old.

    The next forward would compute with it, and so with the weights from before the step.
    """

    def __init__(self) -> None:
        self._units: WeakKeyDictionary[Optimizer, tuple[int, list[ref[Any]]]] = WeakKeyDictionary()

    def after_step(self, optimizer: Optimizer, _args: object, _keywords: object) -> None:
        """Free what is gathered of what `optimizer` trains. All its ranks call it; no collective.

        A step within a backward is left alone: units still need theirs.
        """
        if not torch_hooks.is_in_backward():
            units = (known() for known in self._trained(optimizer))
            torch_sharded.reshard_units(unit for unit in units if unit is not None)

    def _trained(self, optimizer: Optimizer) -> list[ref[Any]]:
        groups = optimizer.param_groups
        count, units = self._units.get(optimizer, (0, []))
        if count != len(groups):
            own = {id(parameter) for group in groups for parameter in group["params"]}
            units = [ref(unit) for unit in torch_sharded.units_with(own)]
            self._units[optimizer] = len(groups), units
        return units


def install() -> None:
    """Free at each optimizer's step what it makes old, from now on."""
    register_optimizer_step_post_hook(Gathered().after_step)


def _own_outputs(_module: nn.Module, _args: object, outputs: Any) -> Any:
    """Return outputs of which none is a view, such as a Linear's of three dims."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        is_plain_view = tensor._is_view() and not isinstance(tensor, DTensor)
        return torch_sharded.as_own(tensor) if is_plain_view else tensor

    return tree_map_only(torch.Tensor, own, outputs)


def is_sharded(model: nn.Module) -> bool:
    """Return whether any part of `model` is under `fully_shard`."""
    return any(isinstance(module, FSDPModule) for module in model.modules())
