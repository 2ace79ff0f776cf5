"""Policies of a layout beside its text: small frozen values that `parallelize` takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies.efficiency import (
    FULL,
    ActivationCheckpoint,
    Compress,
    Offload,
    Precision,
)
from nbdist.shared.errors import LayoutError


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The cuts of the `tp` axis: `parallelize(model, "dp=2 tp=2", TensorParallel(...))`.

    Without it the plan is the model's own (`tp_plan` of transformers), or it is found by tracing
    one forward; `layout.explain()` shows it.

    Attributes:
        plan: Your own plan, which replaces any other. Keys are names of modules, in which `*`
            matches one part of a name, as in `"blocks.*.attn.q"`. Values are words ("column",
            "row", "vocab", "head"; those of transformers are understood) or torch's
            `ParallelStyle` objects.
        sequence: Between attention and mlp each rank keeps its part of the sequence (dim 1), so
            activations there take 1/tp of the memory, for the same traffic. The length must be
            divisible by tp. Attention and mlp must be modules of their own inside a block.
        loss: The head's logits stay cut over the vocabulary: a DTensor, which
            `torch.nn.functional.cross_entropy` takes inside of
            `torch.distributed.tensor.parallel.loss_parallel()`, its backward too.
        example: One small batch to trace with: a tensor, a tuple of arguments or a dict of
            keywords. By itself, token ids or features of the sizes that the model's first
            layers show.
    """

    plan: Mapping[str, Any] | None = None
    sequence: bool = False
    loss: bool = False
    example: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        """Return an equal value for an equal policy: styles have no equality."""
        plan = sorted(map(str, self.plan.items())) if self.plan is not None else None
        return f"plan={plan} sequence={self.sequence} loss={self.loss}"


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
SPLITS = ("parameters", "time")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The schedule of the `pp` axis: `parallelize(model, "pp=2", Pipeline(microbatches=16))`.

    Attributes:
        schedule: "1f1b"; "gpipe" (all forwards, then all backwards); "interleaved" and
            "zero-bubble" (two stages a rank, so less waiting and more messages), "zbv" (zero-bubble
            where a rank has the first and the last of them).
        microbatches: Equal parts that a rank's share of a batch is cut into. None, the default,
            takes the number nearest to 8 that divides the share and that the schedule can order.
        split: The measure that balances the stages: "parameters", which is the default, or "time",
            of a forward and backward of each block; or the first block of each stage, by name or
            number.
        example: One small batch to look at the forward with: a tensor, a tuple of arguments or a
            dict of keywords. By itself, token ids, features or pixels that the first layers take.

    Raises:
        LayoutError: An unknown word, or no micro-batch.
    """

    schedule: str = "1f1b"
    microbatches: int | None = None
    split: str | Sequence[str | int] | None = None
    example: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise LayoutError(
                f"{self.schedule!r} is not a pipeline schedule.",
                do=f"schedules are {', '.join(SCHEDULES)}",
            )
        count = self.microbatches
        if count is not None and (not isinstance(count, int) or count < 1):
            raise LayoutError(
                f"A step of {count!r} micro-batches is not possible.", do="use 1 or more"
            )
        if isinstance(self.split, str) and self.split not in SPLITS:
            raise LayoutError(
                f"{self.split!r} is not a known way to split a model into stages.",
                do='use "parameters", "time", or a list of the first block of each stage',
            )

    def __str__(self) -> str:
        """Return an equal text for an equal policy."""
        return f"schedule={self.schedule} microbatches={self.microbatches} split={self.split}"


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The method of the `cp` axis: `parallelize(model, "dp=2 cp=2", ContextParallel(...))`.

    Each rank has its part of a sequence (dim 1) while blocks run; attention, found by its call of
    `scaled_dot_product_attention`, also that of `nn.MultiheadAttention`, sees all of it. What comes
    before the first block and after the last one runs on the whole sequence, so the loop stays what
    it was. An encoder and a decoder each have a sequence. A length must be divisible by cp.

    Attributes:
        method: "ulysses" gives each rank the whole sequence of some heads (which cp must divide; of
            fewer heads for keys and values several ranks get the same); "gather" gives each rank
            all keys and values, for any number of heads. Ulysses is even between ranks; with gather
            and a causal mask the last one has the most to do.
        loss: Norm, head and loss work on the own part, too, which makes logits 1/cp as large. In a
            plain loop the targets are cut, `layout.own(y)`, and each rank has the mean of its part;
            `layout.step` does so, and returns the mean of all.
        example: One small batch to try the model with, as in `TensorParallel`.
    """

    method: str = "ulysses"
    loss: bool = False
    example: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.method not in ("ulysses", "gather"):
            raise LayoutError(
                f'ContextParallel has no method "{self.method}".', do='use "ulysses" or "gather"'
            )

    def __str__(self) -> str:
        """Return an equal value for an equal policy."""
        return f"method={self.method} loss={self.loss}"


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """What the `ep` axis is tried with: `parallelize(model, "dp=2 ep=2", ExpertParallel(...))`.

    Attributes:
        example: One small batch to find the experts with, as in `TensorParallel`.
    """

    example: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        """Return an equal text for an equal policy."""
        return ""


@dataclass(frozen=True, slots=True)
class Policies:
    """All that was asked for beside the layout's text; by itself, the default of each.

    Its text is the same when the same is asked for again.
    """

    tensor: TensorParallel = field(default_factory=TensorParallel)
    pipeline: Pipeline = field(default_factory=Pipeline)
    context: ContextParallel = field(default_factory=ContextParallel)
    experts: ExpertParallel = field(default_factory=ExpertParallel)
    precision: Precision = FULL
    checkpoint: ActivationCheckpoint | None = None
    compress: Compress | None = None
    offload: Offload | None = None

    @property
    def example(self) -> Any:
        """The batch that a policy was given to try the model with; None where none was."""
        given = (self.tensor, self.pipeline, self.context, self.experts)
        return next((one.example for one in given if one.example is not None), None)

    def with_example(self, batch: Any) -> "Policies":
        """Return the same, which try the model with this batch where they were given no other."""
        if self.example is not None:
            return self
        return replace(
            self,
            tensor=replace(self.tensor, example=batch),
            context=replace(self.context, example=batch),
            experts=replace(self.experts, example=batch),
        )

    def __str__(self) -> str:
        """Return an equal text for an equal policy."""
        return " ".join(f"{f.name}: {getattr(self, f.name)}" for f in fields(self))


# The field of each policy in `Policies`, and the axis that it needs.
_PLACES: dict[type, tuple[str, str | None]] = {
    TensorParallel: ("tensor", "tp"),
    Pipeline: ("pipeline", "pp"),
    ContextParallel: ("context", "cp"),
    ExpertParallel: ("experts", "ep"),
    Precision: ("precision", None),
    ActivationCheckpoint: ("checkpoint", None),
    Compress: ("compress", None),
    Offload: ("offload", None),
}


def read(given: tuple[object, ...], shape: MeshShape) -> Policies:
    """Return the policies that `parallelize` was given.

    Raises:
        LayoutError: Not a policy, two of a kind, or one for a missing axis.
    """
    chosen: dict[str, Any] = {}
    for policy in given:
        name = type(policy).__name__
        if type(policy) not in _PLACES:
            raise LayoutError(
                f"{_shown(policy)} is not a policy.",
                why=f"policies are {', '.join(sorted(kind.__name__ for kind in _PLACES))}",
                do='write for example parallelize(model, "dp=-1 tp=2", TensorParallel(loss=True))',
            )
        place, axis = _PLACES[type(policy)]
        if place in chosen:
            raise LayoutError(f"{name} is given twice.", do="keep one of the two")
        if axis and shape.sizes[axis] == 1:
            raise LayoutError(
                f"{name} is given, and the layout has no axis {axis}.",
                do=f'add the axis, as in "dp=-1 {axis}=2", or leave {name} out',
            )
        chosen[place] = policy
    return Policies(**chosen)


def that_fit(known: Policies, shape: MeshShape) -> tuple[object, ...]:
    """Return of the policies of one layout those that another shape has the axes for."""
    given = ((getattr(known, place), axis) for place, axis in _PLACES.values())
    return tuple(
        one for one, axis in given if one is not None and (not axis or shape.sizes[axis] > 1)
    )


def _shown(policy: object) -> str:
    return policy.__name__ if isinstance(policy, type) else type(policy).__name__
