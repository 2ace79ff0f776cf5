"""The inputs of a model, as one value.

One rule for batches and examples, wherever they are given: a dict is keywords, a tuple or list is
the arguments, all else is the one argument. A model whose one argument is a tuple or dict gets it
within a tuple: `((hidden, cell),)`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of a forward."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def run(self, model: Callable[..., Any]) -> Any:
        """Return the model's output."""
        return model(*self.args, **self.keywords)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        """Return the same with every tensor changed."""
        args, keywords = tree_map_only(torch.Tensor, change, (self.args, self.keywords))
        return Inputs(args, keywords)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return samples_in((self.args, self.keywords))

    def split(self, samples: int, count: int) -> "list[Inputs]":
        """Return `count` parts of them; see `split`."""
        return [Inputs(*part) for part in split((self.args, self.keywords), samples, count)]


def as_inputs(given: Any) -> Inputs:
    """Return a batch or an example as what the model is called with, by the rule above."""
    if isinstance(given, Inputs):
        return given
    if isinstance(given, Mapping):  # a tokenizer's BatchEncoding is no dict
        return Inputs((), dict(given))
    return Inputs(tuple(given) if isinstance(given, tuple | list) else (given,), {})


def as_tree(given: Any) -> Any:
    """Return targets as torch's trees are: of their own kinds of dict, torch looks into dict."""
    return dict(given) if isinstance(given, Mapping) else given


def samples_in(tree: Any) -> int:
    """Return the number of samples of a tree: the length of its first tensor; 0 without one."""
    return next((len(t) for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.dim()), 0)


def tokens_in(tree: Any) -> int | None:
    """Return the number of tokens of a tree, by its first tensor; None without one.

    Samples that are no sequences count as one each.
    """
    first = next((t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.dim()), None)
    if first is None:
        return None
    is_sequence = first.dim() > 2 or (first.dim() == 2 and not first.is_floating_point())
    return first.shape[:2].numel() if is_sequence else len(first)


def split(tree: Any, samples: int, count: int) -> list[Any]:
    """Cut every tensor with as many samples into equal parts; others go whole into each."""

    def part(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            has_samples = tensor.dim() > 0 and len(tensor) == samples
            return tensor.chunk(count)[number] if has_samples else tensor

        return cut

    return [tree_map_only(torch.Tensor, part(number), as_tree(tree)) for number in range(count)]


def join(parts: Sequence[Any]) -> Any:
    """Return the tree that `split` would cut into these parts.

    Raises:
        ValueError: They have other forms, or differ in what belongs to no sample.
        RuntimeError: Their samples have other shapes.
    """
    counts = [samples_in(part) for part in parts]

    def whole(*leaves: Any) -> Any:
        has_samples = [
            isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == count
            for leaf, count in zip(leaves, counts, strict=True)
        ]
        if all(has_samples):
            return torch.cat(leaves)
        if not all(_is_same(leaves[0], leaf) for leaf in leaves[1:]):
            raise ValueError("they differ in what belongs to no sample")
        return leaves[0]

    return tree_map(whole, *map(as_tree, parts))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
