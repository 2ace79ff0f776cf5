"""What the ranks run in test_two_levels: gradients compressed between groups, by definition."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.engine.compat import torch_live
from nbdist.engine.group import ddp_hook_state
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.plan import device_mesh
from nbdist.engine.layout.policies.efficiency import Compress
from nbdist.engine.layout.policies.two_levels import TwoLevels
from nbdist.shared import collectives
from nbdist.shared.errors import LayoutError
from tests.group import models
from tests.group.compress_ranks import flat, gradients, through_a_fault
from tests.group.layout_ranks import calls_of

STEPS = 4
INSIDE = 2


def defined(dtype: torch.dtype, *, feedback: bool) -> list[Tensor]:
    """Return each step's gradient: sums of groups, rounded, added up; in one process."""
    world = dist.get_world_size()
    model = models.make("gpt", torch.float32)
    errors = [torch.zeros(())] * (world // INSIDE)
    averaged = []
    for step in range(STEPS):
        shares = []
        for part in range(world):
            gradients(model, step, part, world)
            shares.append(flat(model) / world)
        sent = []
        for group in range(world // INSIDE):
            mine = shares[group * INSIDE : (group + 1) * INSIDE]
            due = sum(mine[1:], mine[0]) + errors[group]
            sent.append(due.to(dtype))
            errors[group] = due - sent[-1] if feedback else errors[group]
        averaged.append(sum(sent[1:], sent[0]).float())
    return averaged


def apart(*, feedback: bool) -> float:
    """Return how far gradients are from the definition; one step is lost, and made again."""
    model = models.make("gpt", torch.float32)
    parallelize(model, "ddp", Compress("bf16", error_feedback=feedback, between=INSIDE))
    expected = defined(torch.bfloat16, feedback=feedback)
    pairs = zip(through_a_fault(model, STEPS), expected, strict=True)
    return max(float((found - wanted).abs().max()) for found, wanted in pairs)


def sent() -> dict[str, Any]:
    """Return bytes a rank sends in a step inside and between groups: counted, and explained."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = models.make("gpt", torch.float32)
    layout = parallelize(model, "ddp", Compress("fp16", between=INSIDE))
    for step in range(2):
        gradients(model, step, rank, world)
    counted = {"inside": 0.0, "between": 0.0}
    near = rank // INSIDE
    for call in calls_of(partial(gradients, model, 2, rank, world)):
        is_near = all(peer // INSIDE == near for peer in call.ranks)
        n = len(call.ranks)
        moved = collectives.sent_bytes(call.kind, call.bytes, n, "gloo")
        counted["inside" if is_near else "between"] += moved
    explained = layout.explain()
    return {
        "counted": counted,
        "explained": dict(zip(counted, explained.levels, strict=True)),
        "sum": explained.sent_bytes,
        "text": repr(explained),
    }


def odd() -> list[Tensor]:
    """Return the sum inside of five elements, and by how far two ways to cut are apart."""
    levels = TwoLevels(device_mesh.two_levels("cpu", INSIDE))
    mine = torch.arange(5.0) * 10 ** dist.get_rank()
    part = levels.reduce(mine)
    whole = levels.gather(part, 5)
    return [whole, part - levels.own_part(whole)]


def refusal(policy: Compress) -> str:
    try:
        parallelize(models.make("gpt", torch.float32), "ddp", policy)
    except LayoutError as error:
        return str(error)
    return ""


def on_four_ranks() -> dict[str, Any]:
    """Everything that four ranks show, in one process group."""
    torch_live.here.watch()
    ddp_hook_state.here.watch()
    return {
        "alone": apart(feedback=False),
        "feedback": apart(feedback=True),
        "sent": sent(),
        "odd": [found.tolist() for found in odd()],
        "one host": refusal(Compress("bf16", between="hosts")),
        "three": refusal(Compress("bf16", between=3)),
    }
