"""Run the forward of a kept step in one process: the plain model on the part of each rank.

Rank 0 has the whole weights of the layout's model, and runs the parts one after another, each with
the random numbers that its rank began with. What is not finite there, too, is the model's or the
data's; what is not, the layout's. Main thread, all ranks.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.checks import first_bad
from nbdist.engine.checks.chosen_step import Choice
from nbdist.engine.checks.first_bad import bad_rows, is_finite
from nbdist.engine.layout import weight as weights
from nbdist.engine.layout.layout import Layout, layout_of
from nbdist.engine.layout.plan.inputs import samples_in
from nbdist.engine.layout.verify.preconditions import SOURCE, moved, refuse
from nbdist.engine.layout.verify.reference_run import filled, lowered
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.steps.forwards import Forward, tensors_in
from nbdist.engine.steps.kept_step import KeptStep
from nbdist.shared.errors import UsageError
from nbdist.shared.text import name_ranks


def plain_model(kept: KeptStep | None, choice: Choice) -> nn.Module:
    """Return the plain model of a step, without weights. Collective.

    Raises:
        UsageError: There is none, or its forward cannot run again; the same on all ranks.
        LayoutError: It cannot be copied, or there is no room for it.
    """
    do = f"%dist replay {choice.step} says what the ranks find"
    if choice.why_not:
        raise UsageError(
            f"The forward of step {choice.step} cannot run in one process.",
            why=f"of {name_ranks(choice.why_not)}, {next(iter(choice.why_not.values()))}",
            do=do,
        )
    model = None if kept is None else kept.model()
    layout = None if model is None else layout_of(model)
    if layout is None or len(choice.ranks) < dist.get_world_size():
        raise UsageError(
            f"Step {choice.step} cannot run in one process.",
            why="its model has no layout, which would know the plain one and the ranks' parts",
            do=f"nbdist.parallelize the model; {do}",
        )
    return refuse(layout)


def parts_of(kept: KeptStep, model: nn.Module, bare: nn.Module) -> list[dict[str, Any]]:
    """Return what each part of the batch gives in one process; on rank 0, else nothing. Collective.

    Args:
        kept: The step, whose weights and modes the model has now.
        model: With a layout.
        bare: The plain one, without weights.

    Returns:
        Of each part its `rank`, and of each of its `forwards` the first `bad` output, the `rows`
        that it is so for, the `loss` now and what it `was` on the rank; None where not known.
    """
    layout = layout_of(model)
    assert layout is not None, "else it is refused"
    plain = filled(layout, bare, full_tensors.table(layout))
    parts = _gathered(kept, layout)
    if plain is None:
        return []
    low = lowered(layout, plain)
    own = [one.loss for one in kept.forwards]
    buffers = [(buffer, buffer.clone()) for buffer in plain.buffers()]
    found = []
    for rank, sent in parts:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        forwards = []
        for number, one in enumerate(sent):
            made = own[number] if number < len(own) else None
            with torch.no_grad(), nullcontext() if low is None else low.weights():
                forwards.append(_run(one, plain, None if made is None else made.loss_fn))
        found.append({"rank": rank, "forwards": forwards})
    return found


def _gathered(kept: KeptStep, layout: Layout) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return, on rank 0, each part of the batch with the lowest rank that has it. Collective."""
    world, rank = dist.get_world_size(), dist.get_rank()
    first_of = {layout.shape.data_part(one)[0]: one for one in reversed(range(world))}
    is_first = first_of[layout.shape.data_part(rank)[0]] == rank
    mine = [_sent(one) for one in kept.forwards] if is_first else None
    everyone: list[Any] | None = [None] * world if rank == SOURCE else None
    dist.gather_object(mine, everyone, dst=SOURCE)
    device = layout.mesh.device_type
    return [(r, moved(one, device)) for r, one in enumerate(everyone or []) if one is not None]


def _sent(forward: Forward) -> dict[str, Any]:
    made = forward.loss
    value = None if made is None or made.value is None else float(made.value)
    sent: dict[str, Any] = {
        "args": forward.args,
        "keywords": forward.keywords,
        "y": None if made is None else made.y,
        "weight": None if made is None else made.weight,
    }
    own = {"random": forward.random, "autocast": forward.autocast, "was": value}
    return {**moved(sent, "cpu"), **own}


def _run(sent: dict[str, Any], plain: nn.Module, loss_fn: Any) -> dict[str, Any]:
    random = sent["random"]
    states = random._replace(
        rng=random.rng.cpu(), cuda_rng=None if random.cuda_rng is None else random.cuda_rng.cpu()
    )
    args, keywords = sent["args"], sent["keywords"]
    tensors = tuple(tensors_in((args, keywords)))
    forward = Forward(args, keywords, states, sent["autocast"], None, tensors, ())
    samples = samples_in(tensors)
    bad = [tensor for tensor in tensors if not is_finite(tensor)]
    with first_bad.looking(plain, samples) as seen:
        output = forward.run(plain)
    loss = None
    if loss_fn is not None:
        mine = None if sent["weight"] is None else weights.total_of(sent["weight"])
        with forward.autocasting():
            loss = float(weights.loss_of(output, sent["y"], loss_fn, mine).detach())
    rows = (bad_rows(bad, samples) if bad else None) or seen.rows or []
    return {
        "bad": None if seen.first is None else seen.first.to_plain(),
        "is_input": bool(bad),
        "size": samples,
        "rows": rows[:16],
        "bad_rows": len(rows),
        "bad_samples": None,
        "epoch": None,
        "positions": None,
        "samples": None,
        "loss": loss,
        "was": sent["was"],
    }
