"""Weights from files, straight into what each rank holds of a model on meta.

Each rank reads its own parts, and no rank has the whole: a weight that several ranks cut is read by
each of them at its part. Plans are proven on stand-ins. What the folder does not have is
made on rank 0 and sent.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nbdist.engine.compat import torch_hooks
from nbdist.engine.compat.checkpoints import torch_checkpoint
from nbdist.engine.kernel.agreement import each
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.weights import full_tensors, meta_copy, stand_in
from nbdist.engine.layout.weights.full_tensors import TensorFacts
from nbdist.engine.layout.weights.pretrained_folder import Match
from nbdist.engine.layout.weights.safetensors_file import StoredTensor, read_box, unreadable
from nbdist.shared.errors import CheckpointError


class FromFiles:
    """Weights of a folder, and on rank 0 those that it does not have.

    Args:
        match: The place of each weight.
        fresh: The new ones by name; empty but on rank 0.
        facts: Of the new ones, the same on every rank.
    """

    def __init__(
        self, match: Match, fresh: Mapping[str, torch.Tensor], facts: Mapping[str, TensorFacts]
    ) -> None:
        self._match, self._fresh, self._facts = match, fresh, facts

    @contextmanager
    def planning(self, model: nn.Module, shape: MeshShape, device_type: str) -> Iterator[None]:
        """Put stand-ins in the model for axes that run it."""
        if shape.changes_forward:
            with stand_in.lent(model, device_type):
                yield
        else:
            yield

    def fill(self, model: nn.Module, shape: MeshShape, device_type: str, *, shared: bool) -> None:
        """Allocate this rank's parts, and read into them.

        Raises:
            CheckpointError: A rank could not read; the same on all.
        """
        if shared != (shape.fsdp > 1 or shape.is_cut):
            return
        if isinstance(model, FSDPModule):
            # It looks for what has been put in its parameters' places.
            whole: Any = model
            whole._apply(lambda t: torch.empty_like(t, device=device_type) if t.is_meta else t)
        else:
            meta_copy.materialise(model, device_type)
        here = full_tensors.names(model, duplicates=True)
        # A stage of a pipeline may have a tied weight by its second name, or not at all.
        held = {
            first: here[name]
            for first, names in self._match.aliases.items()
            for name in names
            if name in here
        }
        each(lambda: _read(held, self._match.stored))
        for name, full in full_tensors.from_rank_0(self._facts, self._fresh, device_type):
            if name in held:
                full_tensors.put(held[name], full)


@torch.no_grad()
def _read(held: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Read this rank's parts, in their order on the disk."""
    wanted = [name for name in stored if name in held]
    wanted.sort(key=lambda name: (stored[name].path, stored[name].begin))
    with ExitStack() as opened:
        files: dict[Path, int] = {}
        for name in wanted:
            source = stored[name]
            try:
                if source.path not in files:
                    files[source.path] = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
                    opened.callback(os.close, files[source.path])
                offsets, shape = torch_checkpoint.part_of(held[name])
                local = torch_hooks.local_part(held[name].detach())
                assert local.shape == shape, "torch gives the place of the local part"
                read_box(files[source.path], source, offsets, local)
            except OSError as error:
                raise unreadable(source.path, error) from error


def make_fresh(model: nn.Module, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return initial values of parameters that a folder does not have, on the CPU. No collective.

    Modules initialise themselves, as when they are built: by `reset_parameters`, or as transformers
    does it for its models.

    Args:
        model: The plain one, on meta; not changed.
        names: Of parameters.

    Raises:
        CheckpointError: A module cannot.
    """
    found: dict[str, torch.Tensor] = {}
    for name in names:
        owner = name.rpartition(".")[0]
        if name in found:
            continue
        module: Any = copy.deepcopy(model.get_submodule(owner)).to_empty(device="cpu")
        of_transformers = getattr(model, "_init_weights", None)
        if callable(of_transformers):
            of_transformers(module)
        elif callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
        else:
            raise CheckpointError(
                f"{name} is not in the folder, and {type(module).__name__} has no method "
                "reset_parameters to initialise it.",
                do="give the class one, or put the weight into the folder",
            )
        here = {f"{owner}.{n}".lstrip("."): p for n, p in module.named_parameters(recurse=False)}
        found.update((n, here[n].detach()) for n in names if n in here)
    return found
