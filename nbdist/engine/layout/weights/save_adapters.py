"""Write a model's adapters as PEFT does, or its base with them merged, from any layout.

    every rank   its parts, one tensor at a time ─▶ rank 0, which keeps what is written
    rank 0       the plain model, without weights, and these: its own `save_pretrained`

So files, names and configurations are PEFT's own, and plain PEFT loads them. A model of
transformers that got its adapters by `add_adapter` writes the one in use, in the same form.
"""

import copy
import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.compat import torch_quantized
from nbdist.engine.kernel.agreement import each, from_rank_0
from nbdist.engine.layout.weights import full_tensors, meta_copy
from nbdist.engine.layout.weights.full_tensors import LayoutFacts
from nbdist.engine.layout.weights.gather import state_of
from nbdist.shared.errors import CheckpointError


def is_peft(model: nn.Module) -> bool:
    """Return whether a model is one of PEFT, which saves its adapters and not its base."""
    parts = ("peft_config", "get_base_model", "save_pretrained")
    return all(hasattr(model, part) for part in parts)


def takes_adapters(model: nn.Module) -> bool:
    """Return whether a model can be given adapters: one of PEFT, or one of transformers."""
    return all(callable(getattr(model, call, None)) for call in ("add_adapter", "load_adapter"))


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model that can be given adapters has some, which alone it would save."""
    return takes_adapters(model) and bool(getattr(model, "peft_config", None))


def save(spread: LayoutFacts, plain: nn.Module | None, folder: Path) -> None:
    """Write all adapters into a folder: the one called "default" there, others below. Collective.

    Args:
        spread: The layout of the weights.
        plain: Its skeleton.
        folder: Made on rank 0 where it is not there.

    Raises:
        CheckpointError: There is no plain model, or rank 0 could not write; on all ranks.
    """
    bare: Any = _known(plain)
    names = from_rank_0(lambda: _written(bare))
    if names is None:
        whole = _whole(spread, bare)
        each(lambda: None if whole is None else whole.save_pretrained(str(folder)))
        return
    state = state_of(spread, bare, only=names)

    def write() -> None:
        if dist.get_rank() == 0:
            bare.save_pretrained(str(folder), state_dict=state)

    each(write)


def save_merged(spread: LayoutFacts, plain: nn.Module | None, folder: Path) -> None:
    """Write the base with the adapters in use merged, as its own library does. Collective.

    Rank 0 puts the whole model together, on the CPU.

    Args:
        spread: The layout of the weights.
        plain: Its skeleton.
        folder: Made on rank 0 where it is not there.

    Raises:
        CheckpointError: There is no plain model, its base has no `save_pretrained`, or rank 0 could
            not write; on all ranks.
    """
    bare: Any = _known(plain)
    if not is_peft(bare):
        raise CheckpointError(
            f"A {type(bare).__name__} that got its adapters by add_adapter cannot be merged.",
            do="layout.save_pretrained(folder), which writes the adapter; or give it by "
            "peft.get_peft_model before parallelize",
        )
    if any(map(torch_quantized.is_quantized, bare.parameters())):
        raise CheckpointError(
            "Adapters cannot be merged into quantized weights here.",
            why="what is merged has to be quantized anew, and its scales with it",
            do="layout.save_pretrained(folder), which writes the adapters; PEFT loads them onto "
            "the base in its own precision, and merges them there",
        )
    base = bare.get_base_model()
    if not callable(getattr(base, "save_pretrained", None)):
        raise CheckpointError(
            f"A {type(base).__name__} has no save_pretrained, which would write it merged.",
            do="layout.state_dict() on all ranks, into a plain model, and its merge_and_unload()",
        )
    whole = _whole(spread, bare)

    def write() -> None:
        if whole is not None:
            whole.merge_and_unload().save_pretrained(str(folder))

    each(write)


def _known(plain: nn.Module | None) -> nn.Module:
    if plain is None:
        raise CheckpointError(
            "The plain model cannot be put together, so its adapters cannot be written.",
            do="layout.state_dict() on all ranks, into a plain model, and its save_pretrained",
        )
    return plain


def _whole(spread: LayoutFacts, bare: nn.Module) -> Any:
    """Return the plain model with the layout's weights on rank 0, on the CPU. Collective."""

    def room() -> nn.Module | None:
        if dist.get_rank():
            return None
        made = copy.deepcopy(bare)
        meta_copy.materialise(made, "cpu")
        return made

    whole = each(room)
    held = {} if whole is None else full_tensors.names(whole)
    with torch.no_grad():
        for name, full in full_tensors.tensors(spread):
            if name in held:
                held[name].copy_(full)
    return whole


def _written(plain: Any) -> set[str] | None:
    """Return the names of the tensors that PEFT writes: it is asked with tensors on meta.

    None where it writes what it computes, as of prompts, and so needs the whole model.
    """
    peft: Any = importlib.import_module("peft")
    if any(config.is_prompt_learning for config in plain.peft_config.values()):
        return None
    state = plain.state_dict(keep_vars=True)
    chosen = [
        tensor
        for adapter in plain.peft_config
        for tensor in peft.get_peft_model_state_dict(plain, dict(state), adapter).values()
    ]
    names = {id(tensor): name for name, tensor in full_tensors.names(plain).items()}
    if any(id(tensor) not in names for tensor in chosen):
        return None
    return {names[id(tensor)] for tensor in chosen}
