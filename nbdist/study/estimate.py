"""What the ranks of a layout would hold and send: plain numbers, and how they read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.shared.text import aligned, counted, figure, name_bytes, name_ranks


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor of a batch, without its numbers.

    Attributes:
        shape: Its sizes.
        dtype: As torch or numpy name it: "float32".
    """

    shape: tuple[int, ...]
    dtype: str


def shapes_of(batch: Any) -> Any:
    """Return a batch with shapes in the place of its tensors and arrays."""
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        return TensorShape(tuple(map(int, batch.shape)), str(batch.dtype).rpartition(".")[2])
    if isinstance(batch, Mapping):
        return {name: shapes_of(one) for name, one in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)([shapes_of(one) for one in batch])
    return batch


@dataclass(slots=True)
class Traffic:
    """What a rank sends over one axis in a step.

    Attributes:
        count: Collectives and messages.
        payload: Bytes that it puts into them.
        nbytes: Bytes sent for that, headers aside.
        rounds: Messages that are sent one after another for it, each of which waits a latency.
        ranks: The most that one of them joins.
    """

    count: int = 0
    payload: int = 0
    nbytes: float = 0.0
    rounds: int = 0
    ranks: int = 1


@dataclass(slots=True)
class RankEstimate:
    """One rank: bytes, and its traffic in a step.

    Attributes:
        rank: In the world; it stands for all that hold as much.
        parameters: Of its parameters and buffers, between steps.
        gradients: Behind a backward.
        optimizer: Of the optimizer's states.
        activations: What a forward leaves for its backward, at its end.
        buffers: The most that collectives read and write at once: gathered parameters, buckets.
        peak: The most that is alive at once in a step, all of the above among it.
        flops: Floating-point operations of a forward and a backward.
        launches: Operations of these that compute or copy: on a GPU each is a kernel.
        traffic: By axis.
    """

    rank: int
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    peak: int = 0
    flops: int = 0
    launches: int = 0
    traffic: Mapping[str, Traffic] = field(default_factory=dict)


_PARTS = (
    ("parameters", "between steps"),
    ("gradients", "behind a backward"),
    ("optimizer", "its states"),
    ("activations", "at the end of a forward"),
    ("buffers", "of collectives, gathered parameters among them"),
    ("peak", "the most at once in a step"),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a layout would need, a rank. Figures are those of the rank with the highest peak.

    Attributes:
        layout: With all of its sizes, such as "fsdp=8".
        world_size: Ranks.
        ranks: One of each kind that differs: the stages of a pipeline, else one.
        model: Its class.
        parameter_count: Of the whole model.
        notes: What is assumed for want of numbers, in words.
        experts: Of each mixture, which `ep` divides; 0 without `ep`.
    """

    layout: str
    world_size: int
    ranks: tuple[RankEstimate, ...]
    model: str = ""
    parameter_count: int = 0
    notes: tuple[str, ...] = ()
    experts: int = 0

    @property
    def heaviest(self) -> RankEstimate:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda one: one.peak)

    @property
    def parameters(self) -> int:
        """Bytes of a rank's parameters and buffers, between steps."""
        return self.heaviest.parameters

    @property
    def gradients(self) -> int:
        """Bytes of a rank's gradients, behind a backward."""
        return self.heaviest.gradients

    @property
    def optimizer(self) -> int:
        """Bytes of a rank's states of the optimizer."""
        return self.heaviest.optimizer

    @property
    def activations(self) -> int:
        """Bytes that a rank's forward leaves for its backward, at its end."""
        return self.heaviest.activations

    @property
    def buffers(self) -> int:
        """The most bytes that a rank's collectives read and write at once."""
        return self.heaviest.buffers

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once in a rank's step."""
        return self.heaviest.peak

    @property
    def traffic(self) -> Mapping[str, Traffic]:
        """What a rank sends in a step, by axis."""
        return self.heaviest.traffic

    @property
    def flops(self) -> int:
        """Floating-point operations of a rank's forward and backward."""
        return self.heaviest.flops

    @property
    def launches(self) -> int:
        """Operations of a rank's forward and backward that compute or copy."""
        return self.heaviest.launches

    def __str__(self) -> str:
        """Return a table, and a line for each axis."""
        one = self.heaviest
        whose = f"rank {one.rank} has the most" if len(self.ranks) > 1 else "all alike"
        rows = [(name, name_bytes(getattr(one, name)), what) for name, what in _PARTS]
        lines = [f"{self.layout} on {counted(self.world_size, 'rank')}, a rank ({whose}):"]
        lines += [f"  {line}" for line in aligned(rows, (False, True, False))]
        lines += [
            f"  {axis}: {counted(sent.count, 'collective')} a step, {name_bytes(sent.nbytes)} sent"
            for axis, sent in one.traffic.items()
        ]
        lines.append(f"  computes {figure(one.flops / 1e9)} GFLOP a step")
        if len(self.ranks) > 1:
            peaks = ", ".join(f"{name_bytes(r.peak)} on {name_ranks([r.rank])}" for r in self.ranks)
            lines.append(f"  peaks: {peaks}")
        return "\n".join([*lines, *(f"  assumed: {note}" for note in self.notes)])

    __repr__ = __str__
