"""Policies that save: time, memory, or bytes on the wire. Small frozen values, no torch.

`precision`, `activation_checkpoint`, `offload` and `compress` do what these ask for.
"""

from dataclasses import dataclass
from typing import Literal

from nbdist.shared.errors import LayoutError

Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES = ("bf16", "fp16", "fp32")
Compute = Literal["bf16", "fp16", "fp32", "fp8", "mxfp8"]


def _must_be_one_of(words: tuple[str, ...], given: object, what: str) -> None:
    if given not in words:
        *others, last = (f'"{word}"' for word in words)
        raise LayoutError(f"{what} is {given!r}.", do=f"give {', '.join(others)} or {last}")


def _must_be_count(given: object, what: str, other: str = "") -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise LayoutError(f"{what} is {given!r}.", do=f"give {other}a whole number, 1 or more")


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision in which a model computes: `parallelize(model, "fsdp=4", Precision("bf16"))`.

    Parameters, gradients and optimizer states keep the dtype that the model was built with, and
    what the model returns is float32, so that the loss is made of that.

    Attributes:
        compute: "bf16", "fp16", or "fp32": as the model was built. Under fsdp each unit is gathered
            in it and computes in it; else `torch.autocast` chooses operator by operator.
            "fp8" and "mxfp8" are "bf16" in which linear layers inside of blocks multiply numbers of
            eight bits, with a scale for each tensor or for each 32 numbers, by torchao.
        reduce: In what gradients are averaged over the ranks: "fp32" (as they are), "bf16" or
            "fp16". fsdp adds the parts of a step up in it as well (micro-batches,
            `accumulate`).
    """

    compute: Compute = "bf16"
    reduce: Dtype = "fp32"

    def __post_init__(self) -> None:
        _must_be_one_of((*DTYPES, "fp8", "mxfp8"), self.compute, "Precision's compute")
        _must_be_one_of(DTYPES, self.reduce, "Precision's reduce")

    @property
    def words(self) -> str:
        """The precision of computation and averages, in a few words."""
        averaged = f", gradients averaged in {self.reduce}" if self.reduce != "fp32" else ""
        return f"in {self.compute}{averaged}" if self.compute != "fp32" else averaged[2:]

    @property
    def needs_scaler(self) -> bool:
        """Whether small gradients would become zero: fp16 has none below 6e-8."""
        return self.compute == "fp16"


FULL = Precision("fp32")  # what holds where nothing is asked for


@dataclass(frozen=True, slots=True)
class ActivationCheckpoint:
    """Blocks that drop their activations, and compute them again in backward.

    A block is an element of the model's repeated lists. It keeps only its inputs: less memory, for
    up to one more forward. The numbers are the same to the bit; dropout draws the same again.

    Attributes:
        every: 1 for all blocks, 2 for every second one, and so on.
        selective: Matrix products, attention, convolutions and collectives are kept, and only what
            is cheap is computed again: some of the memory, for little time.
    """

    every: int = 1
    selective: bool = False

    def __post_init__(self) -> None:
        _must_be_count(self.every, "ActivationCheckpoint's every")


@dataclass(frozen=True, slots=True)
class Compress:
    """Compression of gradients over dp: `Compress("powersgd", rank=4)`.

    Attributes:
        method: "bf16" or "fp16" rounds each number; "powersgd" sends each matrix as the product of
            two thin ones.
        rank: Of these, for "powersgd": more is nearer to the truth, and more bytes.
        error_feedback: What compression left out is added to the next gradient, so that it is sent
            later and not lost.
        start: The step from which "powersgd" compresses; until then gradients are sent whole.
        between: Groups of near ranks, inside which gradients are averaged as they are; only what
            goes from group to group is compressed. "hosts": the ranks of each host; a number: so
            many neighbours each. None: no groups.
    """

    method: Literal["bf16", "fp16", "powersgd"] = "bf16"
    rank: int = 4
    error_feedback: bool = True
    start: int = 10
    between: Literal["hosts"] | int | None = None

    def __post_init__(self) -> None:
        _must_be_one_of(("bf16", "fp16", "powersgd"), self.method, "Compress's method")
        _must_be_count(self.rank, "Compress's rank")
        _must_be_count(self.start, "Compress's start")
        if self.start < 2:
            raise LayoutError(
                f"Compress's start is {self.start}.",
                why="torch rebuilds its buckets in the first steps",
                do="give 2 or more",
            )
        if self.between is None:
            return
        if self.between != "hosts":
            _must_be_count(self.between, "Compress's between", '"hosts" or ')
        if self.method == "powersgd":
            raise LayoutError(
                "PowerSGD does not go between groups.",
                why="ranks of a group share a bucket's bytes there, and a slice is no matrix",
                do='Compress("bf16", between=...), or leave `between` out',
            )


@dataclass(frozen=True, slots=True)
class Offload:
    """Tensors kept in the host's memory: `parallelize(model, "zero3", Offload())`.

    It comes back when it is needed: more memory on the GPU, for time on the way.

    Attributes:
        parameters: Shards of fsdp with their gradients and optimizer states; the optimizer steps
            on the CPU.
        activations: What the blocks of the model keep for backward.
    """

    parameters: bool = True
    activations: bool = False

    def __post_init__(self) -> None:
        if not (self.parameters or self.activations):
            raise LayoutError(
                "Offload(parameters=False, activations=False) offloads nothing.",
                do="keep one of the two, or leave Offload out",
            )
