"""Prove a layout when the notebook asks, with its last inputs.

The arguments of `layout.step` are a batch and a loss. Where a loop calls the model itself,
inputs are guessed from the first layers. No loss is known then; gradients are proven, and
any loss has some: the outputs are added with fixed weights.

Main thread, in a cell on all ranks.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from nbdist.engine.layout.layout import Layout, layout_of, live_layouts
from nbdist.engine.layout.plan import trace
from nbdist.engine.layout.plan.axis_facts import FACTS
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.engine.layout.verify.report import Proof, in_lines, some_of
from nbdist.engine.layout.weights import meta_copy
from nbdist.shared.errors import LayoutError
from nbdist.shared.text import begin_with_ranks

_SAMPLES = 8  # guessed ones, on each rank
_DO = "layout.verify((x, y), loss_fn) in a cell, or %dist verify after a layout.step"


def verify(handle: str | None, names: dict[str, Any]) -> dict[str, Any]:
    """Return `{"ok", "text"}` of a proof, or `{"error": (what, why, do)}`. Collective.

    Args:
        handle: Name of a layout, or of its model, among `names`; None takes the newest.
        names: The namespace of the rank's cells.
    """
    try:
        proof, how = _prove(find_on_all(handle, names))
    except LayoutError as error:
        return {"error": [error.what, error.why, error.do]}
    return {"ok": proof.ok, "text": f"{proof!r}\n{in_lines(how)}"}


def traffic(names: dict[str, Any]) -> dict[str, Any]:
    """Return `{"name", "bytes"}`: bytes a rank sends a step in the newest layout, or `{"error"}`.

    Collective. The bytes of axes that change the forward, such as tp, follow from the batch of the
    last `layout.step`.

    Args:
        names: The namespace of the rank's cells.
    """
    try:
        layout = find_on_all(None, names)
    except LayoutError as error:
        return {"error": [error.what, error.why, error.do]}
    inputs = None if layout.last_step is None else layout.last_step[0]
    changed = [axis for axis in layout.shape.axes if FACTS[axis].changes_forward]
    known = layout.explain(inputs).traffic
    unknown = [axis for axis in changed if axis not in known]
    if unknown:
        why = f"bytes over {' and '.join(unknown)} follow from a batch, and layout.step has not run"
        do = "compute with layout.step, or compare with the last run: %dist expect bytes 1 %"
        return {"error": [f"It is not known what layout {layout.name} sends.", why, do]}
    return {"name": layout.name, "bytes": sum(known.values())}


def find_on_all(handle: str | None, names: dict[str, Any]) -> Layout:
    """Return the layout, which all ranks have. Collective.

    Raises:
        LayoutError: A rank has none, such as one whose process is new; on all ranks.
    """
    found: Layout | LayoutError
    try:
        found = _find(handle, names)
    except LayoutError as error:
        found = error
    mine = (found.name, found.size.parameters) if isinstance(found, Layout) else None
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    # A new process may have another one, of an earlier model.
    first = next((one for one in held if one is not None), None)
    without = [rank for rank, one in enumerate(held) if one is None or one != first]
    if isinstance(found, LayoutError) and len(without) == len(held):
        raise found
    if without:
        raise LayoutError(
            f"{begin_with_ranks(without)} {'has' if len(without) == 1 else 'have'} no such layout.",
            why="verify needs all ranks, and a new process has no shards or stages",
            do="build the model again and parallelize it, or load a checkpoint, on all ranks",
        )
    assert isinstance(found, Layout)
    return found


def _find(handle: str | None, names: dict[str, Any]) -> Layout:
    if handle is None:
        living = live_layouts()
        if not living:
            raise LayoutError(
                "There is no layout on the ranks.",
                do='layout = nbdist.parallelize(model, "fsdp=-1") in a %%distributed cell',
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
            do=f'nbdist.parallelize({handle}, "fsdp=-1"), or name another',
        )
    return layout


@dataclass(frozen=True, slots=True)
class Batch:
    """What a layout is proven with.

    Attributes:
        x: This rank's inputs.
        y: Its targets.
        loss_fn: Of both.
        how: Where they come from, as people read it.
        is_guessed: Whether no `layout.step` has named them.
    """

    x: Any
    y: Any
    loss_fn: Callable[[Any, Any], torch.Tensor]
    how: str
    is_guessed: bool = False


def _prove(layout: Layout) -> tuple[Proof, str]:
    """Return the proof, and with which batch and loss it was made.

    Raises:
        LayoutError: The model does not run with a guessed one, or uses a part of its parameters.
    """
    batch = batch_of(layout)
    try:
        proof = layout.verify((batch.x, batch.y), batch.loss_fn)
    except LayoutError as error:
        if not batch.is_guessed:
            raise
        why = f"{error.why}. {batch.how}" if error.why else batch.how
        raise LayoutError(error.what, why=why, do=error.do or _DO) from error
    if batch.is_guessed and proof.unreached:
        raise LayoutError(
            f"The batch that was tried does not use {some_of(proof.unreached)}, so the result "
            "would mean "
            "little.",
            why=batch.how,
            do=_DO,
        )
    return proof, batch.how


def batch_of(layout: Layout) -> Batch:
    """Return what the layout's step was last called with, or a guess.

    Raises:
        LayoutError: None is known, and the model does not run with what is guessed.
    """
    if layout.last_step is None:
        return _guessed(layout)
    x, y, loss_fn = layout.last_step
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__).replace("<lambda>", "a lambda")
    how = (
        f"Batch and loss are those of the last layout.step: x is {_words(x)}, y is {_words(y)} on "
        f"rank {dist.get_rank()}, the loss is {name}."
    )
    return Batch(x, y, loss_fn, how)


def _guessed(layout: Layout) -> Batch:
    if layout.skeleton is None:
        raise LayoutError("There is no plain model to compare with.", why=layout.no_skeleton)
    plain = copy.deepcopy(layout.skeleton)
    meta_copy.materialise(plain, "cpu")
    example = layout.policies.example
    try:
        inputs, _ = trace.find_inputs(plain, example)
    except LayoutError as error:
        raise LayoutError(
            "No batch is known to verify the layout with.", why=error.why, do=_DO
        ) from error
    given = "guessed from the first layers" if example is None else "made of the policy's example"
    part, _ = layout.shape.data_part(dist.get_rank())
    inputs = _several(inputs, part)
    shapes = ", ".join(map(_words, [*inputs.args, *inputs.keywords.values()]))
    how = (
        f"layout.step has not run yet, so inputs were {given} ({shapes} on each rank), and the "
        "loss is "
        "the mean of the outputs with fixed weights. layout.verify((x, y), loss_fn) proves with "
        "yours."
    )
    return Batch(inputs, None, _projection, how, is_guessed=True)


def _words(given: Any) -> str:
    """Return a batch in words: dtypes and shapes."""
    if isinstance(given, torch.Tensor):
        return f"{str(given.dtype).removeprefix('torch.')} {tuple(given.shape)}"
    if isinstance(given, Mapping):
        return "{" + ", ".join(f"{key}: {_words(value)}" for key, value in given.items()) + "}"
    if isinstance(given, tuple | list):
        return "(" + ", ".join(map(_words, given)) + ")"
    return repr(given) if isinstance(given, int | float | str | None) else type(given).__name__


def _several(inputs: Inputs, part: int) -> Inputs:
    """Return inputs with more samples, all different, also between parts of a batch.

    Ranks with the same samples have the same gradients, whether these are averaged or not.
    """
    samples = inputs.samples

    def sample(tensor: torch.Tensor, number: int) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        size = tensor.shape[-1]
        # The same values, which are known to be valid (ids), in another order.
        places = torch.arange(size) * (2 * number + 1) + number + number // size
        mixed = tensor[..., places % size]
        return mixed * (0.5 + number * 0.618 % 1) if mixed.is_floating_point() else mixed

    def several(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or len(tensor) != samples:
            return tensor
        return torch.cat([sample(tensor, part * _SAMPLES + i) for i in range(_SAMPLES)])

    return inputs.map(several)


def _projection(outputs: Any, _targets: object) -> torch.Tensor:
    """Return the mean of all outputs with fixed weights: a loss that has gradients."""
    parts = [leaf for leaf in tree_leaves(outputs) if _is_differentiable(leaf)]
    total = sum(map(_weighted, parts))
    assert isinstance(total, torch.Tensor), "a model that is trained has outputs with gradients"
    return total


def _is_differentiable(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad


def _weighted(part: torch.Tensor) -> torch.Tensor:
    """Return a mean with the same weights for each sample: it is that of any pieces' means."""
    each = part.flatten(1) if part.dim() > 1 else part.reshape(-1, 1)
    weights = torch.arange(1, each.shape[1] + 1, device=part.device).sin()
    mean: torch.Tensor = (each * weights.to(part.dtype)).mean()
    return mean
