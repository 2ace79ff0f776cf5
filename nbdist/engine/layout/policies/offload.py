"""Keep in the host's memory what a GPU does not need just now.

Shards: torch's CPUOffloadPolicy. They are in pinned memory, are copied for each gather, gradients
come back, and the optimizer steps on the CPU.

Activations: tensors that autograd saves in a block's forward go to pinned memory, and comes back in
backward, as in `torch.autograd.graph.save_on_cpu`. That moves the weights that autograd saves as
well; here they stay, for they are on the GPU anyway, or will be gathered there.

Source: Ren et al., "ZeRO-Offload", 2021; Rhu et al., "vDNN", 2016.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from nbdist.engine.layout.plan.axis_facts import FACTS
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.plan.wrap_forward import Around
from nbdist.engine.layout.policies.efficiency import ActivationCheckpoint, Offload
from nbdist.shared.errors import LayoutError


def check(
    policy: Offload,
    checkpoint: ActivationCheckpoint | None,
    shape: MeshShape,
    blocks: dict[str, nn.Module],
    *,
    layout: str,
    has_factory: bool,
) -> None:
    """Refuse models without shards or blocks to offload, and policies that do not go together.

    Args:
        policy: The policy.
        checkpoint: The policy of activations.
        shape: Sizes of the axes.
        blocks: The model's, by name.
        layout: The text that `shape` was read from.
        has_factory: The model is made by a function.

    Raises:
        LayoutError: With the nearest that works.
    """
    for axis in shape.axes:
        if not FACTS[axis].can_offload:
            raise LayoutError(f"Offload does not go with {axis} yet.", do="leave one of them out")
    if policy.parameters and shape.fsdp == 1:
        raise _without_shards(layout, shape.world_size)
    if policy.parameters and has_factory:
        raise LayoutError(
            "Offload(parameters=True) does not go with a factory yet.",
            do="give the model itself, on the CPU; it is copied to the GPU once and cut there",
        )
    if policy.activations and checkpoint is not None:
        raise LayoutError(
            "ActivationCheckpoint and Offload(activations=True) both say what becomes of "
            "activations.",
            do="keep one of the two",
        )
    if policy.activations and not blocks:
        raise LayoutError(
            "Offload(activations=True) finds no blocks in this model.",
            why="a block is one of several equal modules in a ModuleList, Sequential or ModuleDict",
            do="use torch.autograd.graph.save_on_cpu around your forward, or leave Offload out",
        )


def _without_shards(layout: str, ranks: int) -> LayoutError:
    if ranks == 1:
        return LayoutError(
            f'Offload(parameters=True) needs shards, and on one rank "{layout}" makes none.',
            why="fsdp cuts parameters over ranks, and one rank holds the whole model",
            do="%dist scale 2, or more; or Offload(parameters=False, activations=True)",
        )
    return LayoutError(
        f'Offload(parameters=True) needs shards, and the layout is "{layout}".',
        why="fsdp copies a unit's shards to the GPU where it gathers them; other layouts "
        "compute with the parameters where they lie",
        do='"zero3", or Offload(parameters=False, activations=True)',
    )


def check_device(device_type: str) -> None:
    """Refuse a model that is in the host's memory already.

    Raises:
        LayoutError: It does.
    """
    if device_type != "cuda":
        raise LayoutError(
            "Offload has nothing to do: this model is on the CPU, in the host's memory already.",
            do="leave Offload out here; it is for models on GPUs",
        )


def for_units(policy: Offload | None) -> OffloadPolicy:
    """Return the policy of memory for the shards of fsdp's units."""
    if policy is None or not policy.parameters:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def apply(blocks: Iterable[nn.Module]) -> None:
    """Let the blocks' activations wait in the host's memory, in place."""
    for block in blocks:
        Offloaded(block)


class Offloaded(Around):
    """A block's forward, whose activations are kept in the host's memory. Main thread."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run the block."""
        # Gathered by now, under fsdp.
        staying = {_storage(parameter) for parameter in self._module.parameters()}
        with saved_tensors_hooks(functools.partial(_to_host, staying), _from_host):
            return self.inner(*args, **keywords)


def _to_host(staying: set[int], saved: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    """Return the kept form of a tensor: itself, or a copy in progress on the GPU's stream."""
    if not saved.is_cuda or _storage(saved) in staying:
        return saved
    there = torch.empty_like(saved, device="cpu", pin_memory=True)
    return saved.device, there.copy_(saved, non_blocking=True)


def _from_host(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    """Return it for backward; on autograd's thread."""
    if isinstance(kept, Tensor):
        return kept
    device, there = kept
    return there.to(device, non_blocking=True)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
