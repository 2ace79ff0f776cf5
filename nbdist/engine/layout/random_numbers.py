"""Random numbers under tp: one stream for the ranks of a group, another for each group.

Ranks that share a weight compute the same activations between its parts, so dropout there must drop
the same on all of them; ranks that work on other samples should drop others. torch's own tracker of
random numbers works for operations on DTensors on a GPU alone, and most of a forward works on plain
tensors, so the generators themselves are aligned, on the CPU and on the GPU. Where a rank holds a
part (heads of an attention, with sequence parallel also parts of the sequence) all ranks of a group
draw the same numbers for their parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nbdist.engine.batches import mix


def align(tp_mesh: DeviceMesh, group: int) -> None:
    """Give this rank its group's stream. Collective in the group.

    Args:
        tp_mesh: The axis `tp`; the state of its first rank counts.
        group: This rank's group, from 0. The first keeps its state; others start a stream that
            follows from the seed and their number.
    """
    device = tp_mesh.device_type
    states = [torch.get_rng_state()]
    if device == "cuda":
        states.append(torch.cuda.get_rng_state())
    seed = torch.tensor([torch.initial_seed()], dtype=torch.uint64)
    shared = [_of_first(tensor, tp_mesh) for tensor in (seed.view(torch.uint8), *states)]
    if group:
        torch.manual_seed(mix(int(shared[0].view(torch.uint64)), group))
        return
    torch.set_rng_state(shared[1])
    if device == "cuda":
        torch.cuda.set_rng_state(shared[2])


def _of_first(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    there = tensor.to(mesh.device_type)
    dist.broadcast(there, group=mesh.get_group(), group_src=0)
    return there.cpu()


@contextmanager
def of_place(*place: int, device_type: str) -> Iterator[None]:
    """Draw a place's own numbers for one step, such as a pipeline stage's dropout.

    The rank's own stream goes on by one number: ranks that draw alike (samples that a cell makes)
    go on doing so, and what a step draws follows from where the stream stood before it.

    Args:
        place: Numbers that say where: another place draws others.
        device_type: "cuda" has a stream of its own there.
    """
    base = int(torch.randint(2**62, ()))
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(mix(base, *place))
        yield
