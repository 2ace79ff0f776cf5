"""Run the forward of a kept step again, and say where it is not finite.

Or its backward, too, where `layout.step` has made the loss. Of a step that was not left out the
weights are made first, by the steps since the newest copy of them (`steps_again`).

All ranks take part that have made it, for a forward may run collectives; what each finds is
its own. Weights, buffers, gradients, modes, random numbers and what modules hold are afterwards as
they were (`layout/verify/restore`), and nothing is counted as a step.

Main thread, in a cell on all ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.checks import first_bad, kept_evidence, one_process
from nbdist.engine.checks.chosen_step import Choice, StepFacts, choose
from nbdist.engine.checks.first_bad import bad_rows, is_finite
from nbdist.engine.checks.first_burst import first_burst
from nbdist.engine.checks.in_float32 import forward_in_float32, in_float32, names_of
from nbdist.engine.checks.in_float32 import why_not as why_not_float32
from nbdist.engine.checks.steps_again import chain, runs_to, weights_of, why_no_run
from nbdist.engine.compat import torch_anomaly
from nbdist.engine.layout.layout import layout_of
from nbdist.engine.layout.plan.inputs import samples_in
from nbdist.engine.layout.verify.restore import unharmed
from nbdist.engine.steps import guard
from nbdist.engine.steps.evidence import INPUT_BYTES
from nbdist.engine.steps.forwards import Forward, in_modes, tensors_in
from nbdist.engine.steps.kept_step import KeptStep
from nbdist.shared.errors import NBDistError
from nbdist.shared.text import name_bytes

# In an answer, which has a bounded size: samples of each forward, and modules of either kind.
MOST_NAMED: Final = 16
MOST_MODULES: Final = 64


def replay(
    step: int | None,
    fp32: bool,
    names: dict[str, Any],
    anomaly: bool = False,
    saved: str = "",
    rank: int | None = None,
    one: bool = False,
) -> dict[str, Any]:
    """Return what this rank finds in a kept step; `{}` where it has none.

    Or `{"error": (what, why, do)}`, the same on all ranks. Collective.

    Args:
        step: Its number in the cell; None takes the newest that was left out, or else the newest.
        fp32: Run its forward in float32, too.
        names: The namespace of the rank's cells.
        anomaly: Run its loss and backward, too.
        saved: The folder to take it from, as `kept_evidence.read`; "" for this rank's memory.
        rank: The one that is asked about; None for all.
        one: Run its forward in one process, too, on rank 0.
    """
    try:
        kept, where = kept_evidence.read(saved) if saved else (guard.here.evidence.steps, "")
    except NBDistError as error:
        return {"error": [error.what, error.why, error.do]}
    everyone: list[list[StepFacts]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, [_said(one, kept) for one in kept])
    try:
        choice = choose(everyone, step, fp32=fp32, rank=rank)
        chosen = [each for each in kept if (each.cell, each.step) == (choice.cell, choice.step)]
        bare = one_process.plain_model(next(iter(chosen), None), choice) if one else None
    except NBDistError as error:
        return {"error": [error.what, error.why, error.do + (saved and ", with the same --from")]}
    if dist.get_rank() not in choice.ranks:
        return {}
    mine, proof = chosen[-1], None
    if choice.begins is not None and (model := mine.model()) is not None:
        weights, proof = weights_of(chain(mine, kept, choice.begins), model)
        mine = replace(mine, weights=weights)
    found = _look(mine, choice, fp32=fp32, anomaly=anomaly) | {"proof": proof}
    if bare is not None:
        found["one"] = _in_one_process(mine, choice, bare)
    return found | {"is_older": False, "where": where} if saved else found


def _in_one_process(kept: KeptStep, choice: Choice, bare: nn.Module) -> list[dict[str, Any]]:
    """Return what one process finds in each part of the batch; on rank 0, else nothing."""
    model = kept.model()
    assert model is not None, "there is a layout of it"
    with _as_it_was(kept, choice, model):
        return one_process.parts_of(kept, model, bare)


def _said(kept: KeptStep, steps: Sequence[KeptStep]) -> StepFacts:
    model = kept.model()
    fits = kept.weights is not None and model is not None and kept.weights.fit(model)
    why_not = _why_not(kept, model)
    refused = "" if why_not or model is None else why_not_float32(model)
    is_left_out = kept.sound is None
    return StepFacts(
        kept.cell,
        kept.step,
        kept.is_of_all,
        len(kept.forwards),
        why_not,
        fits,
        refused,
        sum(one.loss is not None for one in kept.forwards),
        "" if model is None else _why_no_backward(kept, model),
        is_left_out,
        {} if is_left_out else runs_to(kept, steps),
        "" if is_left_out else why_no_run(kept, steps),
        model is not None and _runs_alone(model),
    )


def _runs_alone(model: nn.Module) -> bool:
    """Return whether a forward without gradients needs no other rank: that of a replica."""
    layout = layout_of(model)
    axes = {"dp"} if isinstance(model, DistributedDataParallel) else set[str]()
    if layout is not None:
        axes = set(layout.shape.axes)
    return axes == {"dp"} and next(model.buffers(), None) is None  # rank 0's buffers are sent


def _why_not(kept: KeptStep, model: nn.Module | None) -> str:
    """Return why its forwards cannot run again; "" where they can."""
    if model is None:
        return "its model is not known, or is gone"
    if kept.why_not:
        return kept.why_not
    if (layout := layout_of(model)) is not None and layout.pipeline is not None:
        return "a pipeline's forward is not run again: its stages are parts of one"
    if any(isinstance(one, FullyShardedDataParallel) for one in model.modules()):
        return "a FullyShardedDataParallel is not run again; fully_shard and layouts are"
    if len(kept.modes) != sum(1 for _ in model.modules()):
        return "its model has other modules by now"
    if not kept.forwards:
        if kept.unkept:
            return f"its inputs take more than {name_bytes(INPUT_BYTES)}"
        return (
            "its forward was not seen: a pipeline's, a compiled one, or of a model that was not "
            "known before its first step"
        )
    if any(one.is_changed for one in kept.forwards):
        return "its inputs have been changed in place since"
    return ""


def _why_no_backward(kept: KeptStep, model: nn.Module) -> str:
    """Return why no backward of its forwards can run again; "" where one can."""
    losses = [one.loss for one in kept.forwards if one.loss is not None]
    if not losses:
        return "its loss is not known: layout.step's alone are, by the ranks that have made them"
    if any(one.layout() is None for one in losses):
        return "its layout is gone"
    if any(one.is_changed for one in losses):
        return "its targets have been changed in place since"
    if torch_anomaly.act_in_backward(model.parameters()):
        return "its parameters have hooks that act on a gradient once it is there"
    return ""


def _look(kept: KeptStep, choice: Choice, *, fp32: bool, anomaly: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "step": kept.step,
        "is_older": kept.cell < guard.here.evidence.guarded_cell,
        "loss": kept.loss,
        **_gradients(kept.norms()),
        "is_left_out": choice.is_left_out,
        "no_run": choice.no_run.get(dist.get_rank(), ""),
        "why_not": choice.why_not.get(dist.get_rank(), ""),
        "ran": not choice.why_not,
        "has_weights": choice.has_weights,
        "unkept": kept.unkept,
        "forwards": [],
        "float32": None,
        "backward": None,
    }
    model = kept.model()
    if choice.why_not or model is None:
        answer["forwards"] = [_batch(one) | {"bad": None} for one in kept.forwards]
        return answer
    with _as_it_was(kept, choice, model):
        answer["forwards"] = [_batch(one) | _run(one, model) for one in kept.forwards]
    if anomaly:
        why_not = choice.no_backward.get(dist.get_rank(), "")
        found = [] if choice.no_backward else _backward(kept, choice, model)
        ran = not choice.no_backward
        answer["backward"] = {"why_not": why_not, "ran": ran, "found": found}
    if fp32:
        with _as_it_was(kept, choice, model), in_float32(model) as low:
            forwards = [forward_in_float32(one, low) for one in kept.forwards]
            again = [_batch(one) | _run(one, model) for one in forwards]
        answer["float32"] = {"forwards": again, "instead_of": names_of(low)}
    return answer


@contextmanager
def _as_it_was(kept: KeptStep, choice: Choice, model: nn.Module) -> Iterator[None]:
    with unharmed(model), torch.no_grad(), in_modes(model, kept.modes):
        if choice.has_weights and kept.weights is not None:
            kept.weights.put_into(model)
        yield


def _backward(kept: KeptStep, choice: Choice, model: nn.Module) -> list[dict[str, Any] | None]:
    """Return what is first in the backward of each forward whose loss is known."""
    with _as_it_was(kept, choice, model):
        return [first_burst(one, model) for one in kept.forwards if one.loss is not None]


def _gradients(norms: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the norms of the modules that are not finite, and of those with the largest ones."""
    bad = [module for module, norm in norms.items() if norm is None]
    finite = {module: norm for module, norm in norms.items() if norm is not None}
    largest = sorted(finite, key=lambda module: -finite[module])[:MOST_MODULES]
    named = dict.fromkeys(bad[:MOST_MODULES]) | {module: finite[module] for module in largest}
    return {"gradients": named, "modules": len(norms), "bad_modules": len(bad)}


def _run(forward: Forward, model: nn.Module) -> dict[str, Any]:
    """Return the first output that is not finite, and the rows that it, or the input, is so for."""
    samples = samples_in(forward.tensors)
    bad = [tensor for tensor in forward.tensors if not is_finite(tensor)]
    with first_bad.looking(model, samples) as seen:
        forward.run(model)
    rows = (bad_rows(bad, samples) if bad else None) or seen.rows or []
    names = _samples(forward, samples)
    beside = [] if names is None else _bad_beside(forward, samples)
    return {
        "bad": None if seen.first is None else seen.first.to_plain(),
        "is_input": bool(bad),
        "size": samples,
        "rows": rows[:MOST_NAMED],
        "bad_rows": len(rows),
        "bad_samples": None if names is None else [names[row] for row in rows[:MOST_NAMED]],
        "beside": beside[:MOST_NAMED],
        "beside_rows": len(beside),
        "beside_samples": [names[row] for row in beside[:MOST_NAMED]] if names else [],
    }


def _batch(forward: Forward) -> dict[str, Any]:
    """Return what the loader had given last: epoch, positions, and samples of the dataset."""
    given = forward.given
    if given is None:
        return {"epoch": None, "positions": None, "samples": None}
    samples = given.samples() if given.positions else None
    return {
        "epoch": given.epoch,
        "positions": [given.positions.start, given.positions.stop],
        "samples": None if samples is None else samples[:MOST_NAMED],
    }


def _samples(forward: Forward, rows: int) -> list[int] | None:
    """Return the sample of the dataset that each row is; None where that is not certain.

    It is where the forward got what the loader had given last: a loop may have asked for the next
    batch by then, or have put another together.
    """
    given = forward.given
    if given is None or not rows or len(given.positions) != rows:
        return None
    batch = [tensor for tensor in tensors_in(given.batch) if tensor.dim() and len(tensor) == rows]
    inputs = [tensor for tensor in forward.tensors if tensor.dim() and len(tensor) == rows]
    if not inputs or not all(any(_is_same(one, other) for other in batch) for one in inputs):
        return None
    return given.samples()


def _bad_beside(forward: Forward, rows: int) -> list[int]:
    """Return which rows of what the loader gave, and the forward did not get, are not finite."""
    assert forward.given is not None
    beside = [
        tensor
        for tensor in tensors_in(forward.given.batch)
        if not is_finite(tensor) and not any(_is_same(one, tensor) for one in forward.tensors)
    ]
    return bad_rows(beside, rows) or []


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    mine = one.to(other.device)
    return torch.equal(mine, other) or bool(torch.equal(mine.nan_to_num(), other.nan_to_num()))
