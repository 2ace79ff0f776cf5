"""What a layout's text leaves open: small frozen values that `parallelize` takes beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.errors import LayoutError


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """How the `tp` axis cuts a model: `parallelize(model, "dp=2 tp=2", TensorParallel(...))`.

    Without it the plan is the model's own (`tp_plan` of transformers), else it is found by tracing
    one forward; `layout.explain()` shows it.

    Attributes:
        plan: Your own plan, which then counts alone. Keys are names of modules, in which `*`
            stands for one part of a name, as in `"blocks.*.attn.q"`. Values are words ("column",
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
            layers tell.
    """

    plan: Mapping[str, Any] | None = None
    sequence: bool = False
    loss: bool = False
    example: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        """Return what is the same when the same is asked for again: styles have no equality."""
        plan = sorted(map(str, self.plan.items())) if self.plan is not None else None
        return f"plan={plan} sequence={self.sequence} loss={self.loss}"


def tensor_parallel(policies: tuple[object, ...], has_axis: bool) -> TensorParallel:
    """Return the policy of the `tp` axis, by itself the default one.

    Raises:
        LayoutError: A policy that is none, two of a kind, or one for an axis that is not there.
    """
    mine = [policy for policy in policies if isinstance(policy, TensorParallel)]
    other = next((policy for policy in policies if not isinstance(policy, TensorParallel)), None)
    if other is not None:
        raise LayoutError(
            f"Policies ({type(other).__name__}) come with a later version of nbdist.",
            why="the one of this version is TensorParallel",
            do="leave them out; torch.autocast and torch.utils.checkpoint work as they are",
        )
    if len(mine) > 1:
        raise LayoutError("TensorParallel is given twice.", do="keep one of the two")
    if mine and not has_axis:
        raise LayoutError(
            "TensorParallel is given, and the layout has no axis tp.",
            do='add the axis, as in "dp=-1 tp=2", or leave TensorParallel out',
        )
    return mine[0] if mine else TensorParallel()
