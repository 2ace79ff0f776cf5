"""The preconditions of a proof: whether it is possible, and whether all ranks bring their inputs.

Main thread, all ranks.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from nbdist.engine.compat.checkpoints import tensor_bytes
from nbdist.engine.layout import memory
from nbdist.engine.layout.policies.efficiency import FULL
from nbdist.engine.layout.policies.policies import Policies
from nbdist.engine.layout.policies.precision import Scaler
from nbdist.engine.layout.verify.loss_sync import LossFunction
from nbdist.engine.layout.verify.restore import dropouts
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.layout.weights.full_tensors import LayoutFacts
from nbdist.shared.errors import LayoutError
from nbdist.shared.text import name_bytes

SOURCE = 0  # the rank that computes in one process


class Provable(LayoutFacts, Protocol):
    """The facts of a layout that a proof needs."""

    policies: Policies
    scaler: Scaler
    no_skeleton: str

    @property
    def skeleton(self) -> nn.Module | None:
        """The plain model without weights, with the adapters that are in use."""
        ...

    @property
    def name(self) -> str:
        """Its text."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """The computation of a step.

    Attributes:
        inputs: This rank's; arguments of the two functions, made of tensors and plain values.
        samples: How many there are in it.
        loss_fn: Makes the mean loss of `(model(x), y)`.
        live: Runs forward and backward on the live model; returns the detached loss, None where
            a rank has none.
        alone: Returns the loss of a plain model.
        cut: Cuts inputs into those of single forwards.
        elsewhere: Names of modules that do not run on this rank, whose outputs it makes up.
    """

    inputs: Any
    samples: int
    loss_fn: LossFunction
    live: Callable[[Any, LossFunction], torch.Tensor | None]
    alone: Callable[[nn.Module, Any, LossFunction], torch.Tensor]
    cut: Callable[[Any], list[Any]]
    elsewhere: Sequence[str] = ()


def refuse(layout: Provable) -> nn.Module:
    """Return the plain model without weights; refuse what cannot be proven. On all ranks.

    Raises:
        LayoutError: With the reason.
    """
    if layout.skeleton is None:
        raise LayoutError(
            "There is no plain model to compare this layout with.",
            why=layout.no_skeleton,
            do="keep what cannot be copied (groups, locks, files) out of the model",
        )
    synced = [
        name
        for name, module in layout.skeleton.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
    ]
    if synced:
        raise LayoutError(
            f"{synced[0]} is a SyncBatchNorm, which one process cannot run part by part.",
            do="verify the model with BatchNorm, then convert it",
        )
    places = full_tensors.table(layout)
    # The model, its gradients and copies to compare with; and the first two in float64.
    # In low precision also weights, the mean of gradients and how far they are off.
    copies = 5 if layout.policies.precision == FULL else 8
    needed = sum(copies * place.nbytes + 16 * place.shape.numel() for place in places.values())
    free = memory.free_bytes()
    if layout.mesh.device_type == "cuda":
        # What torch's allocator holds and nothing uses is free, too.
        held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        free = min(free, torch.cuda.mem_get_info()[0] + held)
    least = torch.tensor([free if dist.get_rank() == SOURCE else 2**62])
    least = least.to(layout.mesh.device_type)
    dist.broadcast(least, src=SOURCE)
    if needed > int(least):
        raise LayoutError(
            f"Rank {SOURCE} has {name_bytes(int(least))} free, and one process needs some "
            f"{name_bytes(needed)} for this model.",
            do="verify a model with fewer blocks and the same code",
        )
    return layout.skeleton


def compare_modes(live: nn.Module, plain: nn.Module) -> tuple[dict[str, float], list[str]]:
    """Find modules that drop otherwise than on other ranks, or than when the layout was made.

    Returns by how much they do on this rank, by name, and notes on the second kind. Collective.
    """
    mine = dropouts(live)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    expected: dict[str, float] = {}
    for there in everyone:
        for name, p in there.items():
            expected.setdefault(name, p)
    then = {
        name: float(module.p)
        for name, module in plain.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd)
    }
    modules = dict(live.named_modules())
    notes = [
        f"{name} drops {expected[name]:g} now, and {p:g} when the layout was made."
        for name, p in then.items()
        if name in expected.keys() & modules.keys()
        and modules[name].training
        and expected[name] != p
    ]
    return {n: abs(p - expected[n]) for n, p in mine.items() if p != expected[n]}, notes


def gather_parts(layout: Provable, task: Task) -> list[tuple[Any, float]]:
    """Return, on rank 0, the ranks' inputs, each part once, with its weight. Collective.

    Raises:
        LayoutError: Ranks that work on the same samples bring others; on all ranks.
    """
    on_cpu = moved(task.inputs, "cpu")
    world, shape, rank = dist.get_world_size(), layout.shape, dist.get_rank()
    first_of = {shape.data_part(rank)[0]: rank for rank in reversed(range(world))}
    part, count = shape.data_part(rank)
    mine = (_digest(on_cpu), task.samples, on_cpu if first_of[part] == rank else None)
    everyone: list[Any] | None = [None] * world if rank == SOURCE else None
    dist.gather_object(mine, everyone, dst=SOURCE)
    differing: list[Any] = [None]
    if everyone is not None:
        differing[0] = next(
            (
                (first_of[part], rank)
                for rank in range(world)
                for part in [shape.data_part(rank)[0]]
                if everyone[rank][0] != everyone[first_of[part]][0]
            ),
            None,
        )
    dist.broadcast_object_list(differing, src=SOURCE)
    if differing[0] is not None:
        raise LayoutError(
            f"Ranks {differing[0][0]} and {differing[0][1]} have different samples.",
            why=f'under "{layout.name}" they work on the same ones',
            do="take batches from nbdist.loader, which gives them the same",
        )
    if everyone is None:
        return []
    chosen = [everyone[first_of[part]] for part in range(count)]
    total = sum(samples for _, samples, _ in chosen)
    return [
        (moved(inputs, layout.mesh.device_type), samples * count / total if total else 1.0)
        for _, samples, inputs in chosen
    ]


def moved(inputs: Any, device: str) -> Any:
    """Return inputs with their tensors on a device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device), inputs)


def _digest(inputs: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            digest.update(repr((tuple(leaf.shape), leaf.dtype)).encode())
            digest.update(tensor_bytes.raw(leaf.contiguous()).numpy().tobytes())
        elif isinstance(leaf, int | float | str | bool | None):
            digest.update(repr(leaf).encode())
    return digest.digest()
