"""Find a model's repeated blocks, which are sharded one by one.

FSDP gathers the parameters of one unit at a time; a model that is one single unit is gathered
whole, and nothing is saved while it runs. The units are the elements of the outermost lists of
equal blocks: a transformer's layers, the residual blocks of a ResNet's stages.
"""

from collections import Counter
from collections.abc import Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of `model` by qualified name, in the model's own order.

    A block is an element of a `ModuleList`, `Sequential` or `ModuleDict` that holds at least two
    elements of one class; it has parameters and parts of its own (a bare `Linear` is no block).
    Lists inside a block stay in the block. A block that shares a parameter with something
    outside it is none: if it were sharded, the other place would keep the unsharded tensor.
    """
    return own_alone(model, dict(_outermost(model, "")))


def own_alone(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return those of a model's blocks that share no parameter with something outside of them."""
    owners: Counter[int] = Counter()
    for _, module in model.named_modules(remove_duplicate=True):
        owners.update(id(p) for p in module.parameters(recurse=False))
    return {name: block for name, block in blocks.items() if _owns_alone(block, owners)}


def _outermost(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    repeated = set[type]()
    if isinstance(module, _LISTS):
        classes = Counter(type(child) for child in module.children() if _is_composite(child))
        repeated = {cls for cls, count in classes.items() if count > 1}
    for name, child in module.named_children():
        if type(child) in repeated and _is_composite(child):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def _is_composite(module: nn.Module) -> bool:
    """Return whether `module` can be called, has parts, and has parameters."""
    callable_itself = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    has_parts = next(module.children(), None) is not None
    return callable_itself and has_parts and next(module.parameters(), None) is not None


def _owns_alone(block: nn.Module, owners: Counter[int]) -> bool:
    inside: Counter[int] = Counter()
    for module in block.modules():
        inside.update(id(p) for p in module.parameters(recurse=False))
    return all(inside[p] == owners[p] for p in inside)
