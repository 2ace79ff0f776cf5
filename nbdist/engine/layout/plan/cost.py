"""The cost of a layout: bytes a rank holds and sends. Closed formulas, pure.

P bytes of parameters, n ranks in a ring: an all-gather or a reduce-scatter of P sends
(n - 1) / n * P a rank, an all-reduce twice that. gloo's reduce-scatter is an all-reduce.

Source: Rajbhandari et al., "ZeRO", 2020, section 7; measured on the loopback of a network
namespace, these formulas were within 0.7 %.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nbdist.engine.layout.plan.mesh import MeshShape


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of a whole model's parameters, before it is spread.

    What is quantized and frozen stays whole on every rank that computes with it.
    """

    parameter_bytes: int  # but of what stays whole
    gradient_bytes: int  # of the parameters that are trained
    block_bytes: int  # of the parameters inside blocks, but of what stays whole
    parameters: int  # a count
    whole_bytes: int = 0  # of what stays whole
    whole_parameters: int = 0  # a count


@dataclass(frozen=True, slots=True)
class Wire:
    """The bytes sent for one byte of parameters, and for one of gradients."""

    gathered: float = 1.0
    reduced: float = 1.0


def wire(size: ModelSize, shape: MeshShape, compute: str, reduce: str) -> Wire:
    """Return it for a precision: "fp32" is sent as it is.

    Only fsdp's units compute in parameters of a low precision, and then its gradients are of that,
    so that "fp32" means float32.
    """
    element = size.parameter_bytes / max(size.parameters - size.whole_parameters, 1) or 1.0
    is_low = shape.fsdp > 1 and compute != "fp32"
    full = 4 / element if is_low else 1.0
    return Wire(
        gathered=2 / element if is_low else 1.0,
        reduced=full if reduce == "fp32" else 2 / element,
    )


_AS_IS = Wire()
MIN_COMPRESSION = 2.0  # a matrix that PowerSGD would make less small is sent whole


def power_sgd_share(shapes: Iterable[Sequence[int]], rank: int) -> float:
    """Return the fraction of gradients of these shapes that PowerSGD sends."""
    whole, sent = 0, 0
    for shape in shapes:
        rows, count = (shape[0] if shape else 1), math.prod(shape)
        columns = count // rows
        thin = (rows + columns) * rank
        is_thin = len(shape) > 1 and thin * MIN_COMPRESSION < count
        whole += count
        sent += (rows + columns) * min(rank, rows, columns) if is_thin else count
    return sent / max(whole, 1)


def shared_bytes(
    size: ModelSize, shape: MeshShape, backend: str, sent: Wire = _AS_IS
) -> tuple[float, float]:
    """Return the bytes a rank sends in one optimizer step with one backward: over shards, copies.

    Args:
        size: The model's size.
        shape: `dp` and `fsdp` count, and `cp`, whose ranks share as those of `fsdp` do, or of `dp`
            where there are no shards. With `tp` the size is that of a rank's parts.
            The axis itself reports the activations it sends.
        backend: "gloo" or "nccl".
        sent: In what precision.
    """
    shards = (shape.shards - 1) / shape.shards
    replicas = (shape.replicas - 1) / shape.replicas
    gathered = size.parameter_bytes + (size.block_bytes if shape.gathers_twice else 0)
    scatter = 2 if backend == "gloo" else 1
    gradients = sent.reduced * size.gradient_bytes
    inside = shards * (sent.gathered * gathered + scatter * gradients)
    averaged = 2 * replicas * gradients / shape.shards
    return inside, averaged + (replicas * size.gradient_bytes if shape.shards_states else 0)


def two_level_bytes(
    gradients: float, inside: int, groups: int, backend: str, compressed: float
) -> tuple[float, float]:
    """Return the bytes a rank sends to average gradients in two levels: inside, between groups.

    Args:
        gradients: Bytes of all gradients.
        inside: Ranks of a group. A reduce-scatter of gradients as they are, and an all-gather of
            compressed ones.
        groups: How many there are. An all-reduce of a slice of compressed ones.
        backend: "gloo" or "nccl".
        compressed: The fraction of bytes that is sent between groups.
    """
    scatter = 2 if backend == "gloo" else 1
    sent = compressed * gradients
    return (
        (inside - 1) / inside * (scatter * gradients + sent),
        2 * (groups - 1) / groups * sent / inside,
    )


def resident_bytes(size: ModelSize, shape: MeshShape) -> float:
    """Return the bytes of parameters and gradients a rank keeps between steps."""
    return size.whole_bytes + (size.parameter_bytes + size.gradient_bytes) / shape.shards


def state_share(shape: MeshShape) -> float:
    """Return the fraction of its optimizer's states that a rank keeps.

    An optimizer with k numbers a parameter keeps k * P bytes of them on one process.
    """
    return 1 / (shape.replicas if shape.shards_states else shape.shards)
