"""Refuse a model that an optimizer holds already, where an axis replaces parameters by parts."""

import gc

import torch
from torch import nn

from nbdist.engine.compat import heap
from nbdist.engine.layout.axes import in_turns
from nbdist.shared.errors import LayoutError


def refuse(model: nn.Module, axis: str) -> None:
    """Refuse a model whose parameters an optimizer holds already.

    Raises:
        LayoutError: There is one.
    """
    if _optimizers_of(model):
        gc.collect()  # one that only a reference cycle keeps trains nothing
        found = _optimizers_of(model)
        if found:
            raise LayoutError(
                f"An optimizer ({type(found[0]).__name__}) already holds this model's parameters.",
                why=f"{axis} replaces parameters by shards; that optimizer would keep stepping "
                "the old ones and train nothing, without an error",
                do="delete it, parallelize the model, and make the optimizer after that",
            )


def _optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the living optimizers that hold a parameter of `model`.

    Looks at all objects of the process (some 0.05 s), for torch has no hook on an optimizer's
    construction and a class patched by us could miss those made before.
    """
    wanted = {id(p) for p in model.parameters()}
    return [
        candidate
        for candidate in heap.living(torch.optim.Optimizer)
        if not in_turns.is_stand_in(candidate)  # of a step that failed: to look gathers
        and any(
            id(p) in wanted
            for group in getattr(candidate, "param_groups", ())
            for p in group["params"]
        )
    ]
