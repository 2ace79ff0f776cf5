"""Find the dims that follow a sequence in a model, by running it on fake tensors of two lengths.

Each list of blocks has a sequence of its own: what queries of its attention are along. A dim that
has its size in both runs follows it. Of a model that runs with one length only, all dims of that
size are taken. Blocks of a decoder are given an encoder's sequence, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from nbdist.engine.layout.axes.cp.attention import CALL
from nbdist.engine.layout.axes.cp.multi_head import MULTI_HEAD, multi_head
from nbdist.engine.layout.plan import trace
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.shared.errors import LayoutError

Tensors = dict[str, Tensor]  # by their place in args and keywords: "[0][1]", "[1]['cos']"


@dataclass(frozen=True, slots=True)
class Attended:
    """The arguments of one call of attention, inside of a block."""

    block: str
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool


@dataclass(slots=True)
class Run:
    """A record of one forward; its tensors are fake.

    Attributes:
        order: Names of blocks, as they were called.
        given: The arguments of each block.
        made: The outputs of each block.
        attended: Calls of attention inside of blocks.
    """

    order: list[str] = field(default_factory=list)
    given: dict[str, Tensors] = field(default_factory=dict)
    made: dict[str, Tensors] = field(default_factory=dict)
    attended: list[Attended] = field(default_factory=list)

    def tokens(self, of_list: str) -> int:
        """Return the tokens of a list's sequence: those of its first queries."""
        queries = (one.query for one in self.attended if list_of(one.block) == of_list)
        return next((query.shape[-2] for query in queries), 0)

    def passes_on(self, name: str, tensor: Tensor) -> bool:
        """Return whether an argument of a block was made by a block of its list."""
        made = (self.made[one] for one in self.order if list_of(one) == list_of(name))
        return any(tensor is other for outputs in made for other in outputs.values())


Dims = dict[str, tuple[int, ...]]  # by the place of a tensor


@dataclass(frozen=True, slots=True)
class Follows:
    """The dims that follow a sequence.

    Attributes:
        given: By block, of its arguments: its own sequence.
        others: By block, of its arguments: that of a list of blocks that was called before.
        made: By block, of its outputs: its own sequence.
    """

    given: dict[str, Dims]
    others: dict[str, Dims]
    made: dict[str, Dims]


def list_of(block: str) -> str:
    """Return the name of a block's list."""
    return block.rpartition(".")[0]


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
    seen = Run()
    inside: list[str] = []
    hooks = []
    for name, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(_begins(name, seen, inside), with_kwargs=True))
        hooks.append(block.register_forward_hook(_ends(name, seen, inside)))
    try:
        with _Watching(seen, inside):
            trace.run_on_fakes(model, inputs, parts)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def follows(first: Run, second: Run | None) -> Follows:
    """Return the dims that have the size of a sequence in both runs, or in the only one."""
    runs = (first, second or first)

    def dims(name: str, kind: str, sizes: set[tuple[int, ...]]) -> Dims:
        of_runs = [getattr(run, kind)[name] for run in runs]
        return {
            place: tuple(dim for dim, pair in enumerate(_sizes(place, of_runs)) if pair in sizes)
            for place in of_runs[0]
            if place in of_runs[1]
        }

    given: dict[str, Dims] = {}
    others: dict[str, Dims] = {}
    made: dict[str, Dims] = {}
    seen: dict[str, tuple[int, ...]] = {}
    for name in first.order:
        seen[list_of(name)] = own = tuple(run.tokens(list_of(name)) for run in runs)
        before = {sizes for one, sizes in seen.items() if one != list_of(name)}
        given[name], made[name] = dims(name, "given", {own}), dims(name, "made", {own})
        others[name] = {
            place: found
            for place, found in dims(name, "given", before).items()
            if len(found) == 1 and not first.passes_on(name, first.given[name][place])
        }
    return Follows(given, others, made)


def _sizes(place: str, of_runs: list[Tensors]) -> list[tuple[int, ...]]:
    return list(zip(*(tensors[place].shape for tensors in of_runs), strict=False))


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


def shorter(inputs: Inputs) -> Iterator[Inputs]:
    """Yield inputs with a token less: all that are as long as the first; or texts alone."""
    yield shortened(inputs, length_of(inputs) - 1)
    yield inputs.map(lambda x: x if x.dim() < 2 or x.is_floating_point() else x[:, :-1])


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


def _ends(name: str, seen: Run, inside: list[str]) -> Any:
    def end(_block: nn.Module, _args: object, made: Any) -> None:
        inside.pop()
        seen.made[name] = tensors_of(made)

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
        if func is MULTI_HEAD and self._inside:
            return multi_head(self._note, lambda mask, _queries, _keys: mask, *args, **kwargs)
        if func is CALL and self._inside:
            return self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(self, *args: Any, **kwargs: Any) -> Tensor:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = (given[name] for name in names[:3])
        is_causal = given.get("is_causal", False)
        self._seen.attended.append(Attended(self._inside[-1], query, key, value, is_causal))
        return CALL(*args, **kwargs)
