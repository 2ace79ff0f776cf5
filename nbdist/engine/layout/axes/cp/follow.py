"""Find the dims that follow the sequence in a model, by running it on fake tensors of two lengths.

A dim that has the size of the sequence in both runs follows it. Of a model that runs with one
length only, all dims of that size are taken.
"""

# T tokens of a run

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from nbdist.engine.layout.axes.cp.attention import CALL
from nbdist.engine.layout.plan import trace
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.shared.errors import LayoutError

Tensors = dict[str, Tensor]  # by their place in args and keywords: "[0][1]", "[1]['cos']"


@dataclass(frozen=True, slots=True)
class Attended:
    """The arguments of one call of attention."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(slots=True)
class Run:
    """A record of one forward; its tensors are fake.

    Attributes:
        length: Tokens of a sequence.
        order: Names of blocks, as they were called.
        given: The arguments of each block.
        made: The outputs of the last block.
        attended: Calls of attention inside of blocks.
    """

    length: int
    order: list[str] = field(default_factory=list)
    given: dict[str, Tensors] = field(default_factory=dict)
    made: Tensors = field(default_factory=dict)
    attended: list[Attended] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Follows:
    """The dims that follow the sequence, of the blocks' arguments and the last one's outputs."""

    given: dict[str, dict[str, tuple[int, ...]]]
    made: dict[str, tuple[int, ...]]


def run(
    model: nn.Module, blocks: dict[str, nn.Module], inputs: Inputs, parts: dict[str, torch.Size]
) -> Run:
    """Return a record of a forward.

    Args:
        model: Not changed.
        blocks: The observed ones, by name.
        inputs: Its inputs.
        parts: Shapes of parameters on one rank, where they differ: with tp.
    """
    seen = Run(length_of(inputs))
    inside: list[str] = []
    hooks = []
    for name, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(_begins(name, seen, inside), with_kwargs=True))
        hooks.append(block.register_forward_hook(_ends(seen, inside)))
    try:
        with _Watching(seen, inside):
            trace.run_on_fakes(model, inputs, parts)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def follows(first: Run, second: Run | None) -> Follows:
    """Return the dims that have the size of the sequence in both runs, or in the only one."""
    other = second or first

    def dims(a: Tensors, b: Tensors) -> dict[str, tuple[int, ...]]:
        return {
            place: tuple(
                dim
                for dim, sizes in enumerate(zip(tensor.shape, b[place].shape, strict=False))
                if sizes == (first.length, other.length)
            )
            for place, tensor in a.items()
            if place in b
        }

    given = {name: dims(first.given[name], other.given[name]) for name in first.given}
    return Follows(given, dims(first.made, other.made))


def length_of(inputs: Inputs) -> int:
    """Return the tokens of a sequence: dim 1 of the first tensor that has one, else 0."""
    tensors = tensors_of((inputs.args, inputs.keywords)).values()
    return next((tensor.shape[1] for tensor in tensors if tensor.dim() > 1), 0)


def check_sequences(inputs: Inputs) -> None:
    """Refuse inputs of which dim 1 is no sequence.

    Raises:
        LayoutError: They are images.
    """
    tensors = tensors_of((inputs.args, inputs.keywords)).values()
    first = next((tensor for tensor in tensors if tensor.dim() > 1), None)
    if first is not None and first.dim() > 3 and first.is_floating_point():
        raise LayoutError(
            f"The model takes images, of shape {tuple(first.shape)}, and cp cuts sequences.",
            why="a sequence is dim 1 of what the model is called with, which are channels here",
            do='leave cp out; "zero3" takes any model',
        )


def shortened(inputs: Inputs, length: int) -> Inputs:
    """Return the same with sequences of `length` tokens: dim 1 of tensors as long as the first."""
    whole = length_of(inputs)
    return inputs.map(
        lambda tensor: (
            tensor.narrow(1, 0, length) if tensor.dim() > 1 and tensor.shape[1] == whole else tensor
        )
    )


def tensors_of(tree: Any) -> dict[str, Tensor]:
    """Return the tensors of a tree by their place in it."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _begins(name: str, seen: Run, inside: list[str]) -> Any:
    def begin(_block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        inside.append(name)
        seen.order.append(name)
        seen.given[name] = tensors_of((args, keywords))

    return begin


def _ends(seen: Run, inside: list[str]) -> Any:
    def end(_block: nn.Module, _args: object, made: Any) -> None:
        inside.pop()
        seen.made = tensors_of(made)

    return end


class _Watching(TorchFunctionMode):
    """Notes calls of attention inside of blocks."""

    def __init__(self, seen: Run, inside: list[str]) -> None:
        super().__init__()
        self._seen, self._inside = seen, inside

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is CALL and self._inside:
            names = ("query", "key", "value")
            given = dict(zip(names, args, strict=False)) | kwargs
            self._seen.attended.append(Attended(*(given[n] for n in names)))
        return func(*args, **kwargs)
