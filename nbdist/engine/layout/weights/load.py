"""Copy weights and buffers into a layout, by name: from another layout, a module or a state dict.

All that can be refused is refused before anything is changed. The state of optimizers stays where
it is, for an optimizer belongs to the model it was made with.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.engine.compat import torch_quantized
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.layout.weights.full_tensors import LayoutFacts, TensorFacts
from nbdist.shared.errors import LayoutError

_SHOWN = 3  # names in an error


def from_spread(target: LayoutFacts, source: LayoutFacts) -> None:
    """Copy from a model that is spread over the same ranks, however. Collective.

    Raises:
        LayoutError: The models have other names or shapes; nothing was changed.
    """
    given = full_tensors.table(source, duplicates=True)
    _copy(target, given, _with_aliases(source, given))


def from_one(target: LayoutFacts, source: nn.Module | Mapping[str, torch.Tensor] | None) -> None:
    """Copy from rank 0's plain module or state dict; other ranks may have none. Collective.

    Raises:
        LayoutError: As `from_spread`, or it has parts of tensors.
    """
    held: dict[str, torch.Tensor] = {}
    given: dict[str, TensorFacts] = {}
    has_parts = False
    if dist.get_rank() == 0:
        if isinstance(source, nn.Module):
            held, given = (
                full_tensors.names(source, duplicates=True),
                full_tensors.places(source, duplicates=True),
            )
        else:
            items = dict(source or {}).items()
            found = {name: value for name, value in items if isinstance(value, torch.Tensor)}
            held = torch_quantized.parts(found)
            given = {name: TensorFacts(t.shape, t.dtype) for name, t in held.items()}
        has_parts = any(_is_cut(tensor) for tensor in held.values())
    sent = [(given, has_parts)]
    dist.broadcast_object_list(sent, src=0)
    given, has_parts = sent[0]
    if has_parts:
        raise LayoutError(
            "These weights are parts of tensors, as the state dict of a spread model is.",
            do="give the layout they come from: layout.load_from(other_layout)",
        )
    _copy(target, given, full_tensors.from_rank_0(given, held, target.mesh.device_type))


def refuse_whole(
    target: LayoutFacts, state: Mapping[str, Any], prefix: str, elsewhere: Collection[str]
) -> None:
    """Refuse, before torch's `load_state_dict` copies any, weights of which ranks have parts.

    It would fail in its midst. Shards for shards, and the names of this rank's stages, it takes.

    Args:
        target: The target model.
        state: The loaded state.
        prefix: Of names there.
        elsewhere: Names of other stages that it would not take.

    Raises:
        LayoutError: A whole tensor is meant for shards, or for another stage.
    """
    full_tensors.settle(target.model)
    cut = (n for n, t in full_tensors.names(target.model, duplicates=True).items() if _is_cut(t))
    found = [n for n in cut if prefix + n in state and not _is_cut(state[prefix + n])]
    found += [n for n in elsewhere if prefix + n in state]
    if found:
        raise LayoutError(
            f'load_state_dict got whole weights, and in the layout "{target.shape.name}" this rank '
            f"has a part of them: {_few(found)}.",
            why="nothing was changed",
            do="layout.load_from(state), on all ranks: rank 0's state counts",
        )


def _is_cut(tensor: object) -> bool:
    """Return whether ranks have parts of a tensor."""
    return isinstance(tensor, DTensor)


def _copy(
    target: LayoutFacts,
    given: Mapping[str, TensorFacts],
    source: Iterator[tuple[str, torch.Tensor]],
) -> None:
    _check(full_tensors.table(target, duplicates=True), given)
    held = full_tensors.names(target.model, duplicates=True)
    for name, full in source:
        # With pp this rank has the names of its stages; constants may be on one side only.
        tensor = held.get(name)
        if tensor is not None and not tensor.is_meta and tensor.shape == full.shape:
            full_tensors.put(tensor, full)


def _with_aliases(
    source: LayoutFacts, given: Mapping[str, TensorFacts]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tied tensors by each of their names, for the other model may not tie them."""
    held = full_tensors.names(source.model, duplicates=True)
    aliases: dict[int, list[str]] = {}
    for name, tensor in held.items():
        aliases.setdefault(id(tensor), []).append(name)
    for name, full in full_tensors.tensors(source):
        here = held.get(name)
        for alias in [name] if here is None else aliases[id(here)]:
            if alias in given:
                yield alias, full


def _check(wanted: Mapping[str, TensorFacts], given: Mapping[str, TensorFacts]) -> None:
    """Refuse, on every rank, what does not fit by name and shape.

    Raises:
        LayoutError: With the first few names of each kind.
    """
    missing = [name for name, place in wanted.items() if place.is_saved and name not in given]
    unexpected = [name for name, place in given.items() if place.is_saved and name not in wanted]
    other = [
        f"{name} is {tuple(given[name].shape)} and must be {tuple(place.shape)}"
        for name, place in wanted.items()
        if name in given and place.is_saved and given[name].shape != place.shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": other}
    found = [f"{len(those)} {kind} ({_few(those)})" for kind, those in kinds.items() if those]
    if found:
        raise LayoutError(
            f"These weights do not fit the model: {'; '.join(found)}.",
            why="they are copied by name; nothing was changed",
            do="give weights of the same model, or rename the keys of its state_dict",
        )


def _few(items: list[str]) -> str:
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
