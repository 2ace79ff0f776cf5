"""Prove a layout when the notebook asks, with what it was last called with.

What `layout.step` was called with is a batch and a loss. Where a loop calls the model itself,
inputs are guessed from the first layers. No loss is known then; gradients are what is proven, and
any loss has some: the outputs are added with fixed weights.

Main thread, in a cell on all ranks.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nbdist.engine.layout import dry_run, skeleton
from nbdist.engine.layout.alive import live_layouts
from nbdist.engine.layout.inputs import Inputs
from nbdist.engine.layout.layout import Layout, layout_of
from nbdist.engine.layout.verdict import Proof
from nbdist.errors import LayoutError

_SAMPLES = 8  # guessed ones, on each rank


def verify(handle: str | None, names: dict[str, Any]) -> dict[str, Any]:
    """Return `{"ok", "text"}` of a proof, or `{"error": (what, why, do)}`. Collective.

    Args:
        handle: Name of a layout, or of its model, among `names`; None takes the newest.
        names: Those of the rank's cells.
    """
    try:
        layout = _find(handle, names)
        proof, how = _prove(layout)
    except LayoutError as error:
        return {"error": [error.what, error.why, error.do]}
    return {"ok": proof.ok, "text": f"{proof!r}\n  {how}"}


def _find(handle: str | None, names: dict[str, Any]) -> Layout:
    if handle is None:
        living = live_layouts()
        if not living:
            raise LayoutError(
                "No layout is alive on the ranks.",
                do='layout = nbdist.parallelize(model, "fsdp=2") in a %%distributed cell',
            )
        return max(living, key=lambda layout: layout.number)
    if handle not in names:
        raise LayoutError(
            f"There is no {handle} on the ranks.", do="name a layout, or a model that has one"
        )
    found = names[handle]
    layout = layout_of(found) if isinstance(found, nn.Module) else found
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"{handle} is a {type(found).__name__}, which has no layout.",
            do=f'nbdist.parallelize({handle}, "fsdp=2"), or name another',
        )
    return layout


def _prove(layout: Layout) -> tuple[Proof, str]:
    """Return the proof, and with which batch and loss it was made."""
    if layout.last_step is not None:
        x, y, loss_fn = layout.last_step
        return layout.verify((x, y), loss_fn), "Batch and loss are those of the last layout.step."
    if layout.skeleton is None:
        raise LayoutError("There is no plain model to compare with.", why=layout.no_skeleton)
    plain = copy.deepcopy(layout.skeleton)
    skeleton.materialise(plain, "cpu")
    example = layout.policies.example
    try:
        inputs, _ = dry_run.find_inputs(plain, example)
    except LayoutError as error:
        raise LayoutError(
            "No batch is known to prove the layout with.",
            why=error.why,
            do="layout.verify((x, y), loss_fn) in a cell, or prove after a layout.step",
        ) from error
    given = "guessed from the first layers" if example is None else "made of the policy's example"
    how = (
        f"Inputs were {given}, and the loss is the mean of the outputs with fixed weights: "
        "layout.verify((x, y), loss_fn) proves with yours."
    )
    return layout.verify((_repeated(inputs), None), _projection), how


def _repeated(inputs: Inputs) -> Inputs:
    """Return inputs with their samples several times over."""
    samples = inputs.samples

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        has_samples = tensor.dim() > 0 and len(tensor) == samples
        return torch.cat([tensor] * _SAMPLES) if has_samples else tensor

    return inputs.map(repeat)


def _projection(outputs: Any, _targets: object) -> torch.Tensor:
    """Return the mean of all outputs with fixed weights: a loss that has gradients."""
    parts = [leaf for leaf in tree_leaves(outputs) if _is_differentiable(leaf)]
    total = sum(map(_weighted, parts))
    assert isinstance(total, torch.Tensor), "a model that is trained has outputs with gradients"
    return total


def _is_differentiable(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad


def _weighted(part: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0, part.numel(), part.numel(), device=part.device).sin()
    mean: torch.Tensor = (part.flatten() * weights.to(part.dtype)).mean()
    return mean
