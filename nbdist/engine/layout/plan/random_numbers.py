"""Random numbers under tp and cp: one stream for the ranks that see the same samples.

Ranks that share a weight compute the same activations between its parts, so dropout there must drop
the same on all of them; ranks that work on other samples should drop others. torch's own tracker of
random numbers works only for operations on DTensors on a GPU, and most of a forward works on plain
tensors, so the generators themselves are aligned, on the CPU and on the GPU. Where a rank holds a
part (heads of an attention, with sequence parallel also parts of the sequence) all ranks of a group
draw the same numbers for their parts.

Ranks of cp compute the same outside the blocks, and on different tokens inside them:
there each draws from its own stream (`independent`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nbdist.engine.compat import torch_hooks
from nbdist.engine.data.batches import mix
from nbdist.engine.layout.plan import numbers


def align(mesh: DeviceMesh, group: int) -> None:
    """Give this rank its group's stream. Collective in the group.

    Args:
        mesh: The axis `tp` or `cp`; the state of its first rank counts. Called for both, all ranks
            that see the same samples have one stream.
        group: This rank's group, from 0. The first keeps its state; others start a stream that
            follows from the seed and their number.
    """
    if not numbers.are_here():
        return
    own = states(mesh.device_type == "cuda")
    seed = torch.tensor([torch.initial_seed()], dtype=torch.uint64)
    shared = [_of_first(tensor, mesh) for tensor in (seed.view(torch.uint8), *own)]
    if group:
        torch.manual_seed(mix(int(shared[0].view(torch.uint64)), group))
        return
    restore(shared[1:])


@contextmanager
def independent(mesh: DeviceMesh, *, is_on: bool) -> Iterator[None]:
    """Let each rank of the mesh draw different random numbers in the block, and the same after it.

    All of it follows from the stream that the ranks share, so nothing else has to be saved, and
    what is computed again from there draws the same. If numbers were drawn that stream advances
    by one number, otherwise it stays: numbers that a loop draws beside a model without dropout (a
    shuffle, noise) are the same as in one process.

    Args:
        mesh: Ranks that share a stream, and work on different parts of the same samples.
        is_on: False changes nothing.
    """
    if not is_on or not numbers.are_here():
        yield
        return
    # A compiler breaks its graph here in any case; excluded, it logs nothing about it.
    draw = _draw_uncompiled if torch.compiler.is_compiling() else _draw
    on_gpu = mesh.device_type == "cuda"
    shared = states(on_gpu)
    seed = mix(draw(), mesh.get_local_rank())
    moved = states(on_gpu)
    torch.manual_seed(seed)
    begun = states(on_gpu)
    try:
        yield
    finally:
        has_drawn = not all(map(torch.equal, states(on_gpu), begun))
        restore(moved if has_drawn else shared)


def states(on_gpu: bool) -> list[torch.Tensor]:
    """Return the states of the generators: the CPU's, and that of this rank's GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def restore(before: list[torch.Tensor]) -> None:
    """Put the generators into states that they were in; without one they stay."""
    if before:
        torch.set_rng_state(before[0])
    if len(before) > 1:
        torch.cuda.set_rng_state(before[1])


def _draw() -> int:
    """Return the stream's next number."""
    return int(torch.randint(1 << 62, ()))


_draw_uncompiled = torch_hooks.left_alone(_draw)


def seed_part(step: int, part: int) -> None:
    """Begin the stream of one part of a batch in a proof's step: equal wherever it is computed."""
    torch.manual_seed(mix(step, part))


def _of_first(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    there = tensor.to(mesh.device_type)
    dist.broadcast(there, group=mesh.get_group(), group_src=0)
    return there.cpu()


@contextmanager
def of_place(*place: int, device_type: str) -> Iterator[None]:
    """Use a place's own random numbers for one step, such as a pipeline stage's dropout.

    The rank's stream advances by one number: ranks that draw the same (samples that a cell makes)
    continue to do so, and a step's numbers follow from the state of the stream before it.

    Args:
        place: Numbers that identify the place: others draw differently.
        device_type: "cuda" has its own stream there.
    """
    if not numbers.are_here():
        yield
        return
    base = _draw()
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(mix(base, *place))
        yield
