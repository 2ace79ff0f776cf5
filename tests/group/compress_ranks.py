"""What the ranks run in test_compress: compressed gradients against their definitions."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.engine.compat import torch_live, torch_modules
from nbdist.engine.group import ddp_hook_state
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.efficiency import Compress, Precision
from nbdist.shared import collectives
from nbdist.shared.errors import LayoutError
from tests.group import models
from tests.group.layout_ranks import GLOBAL_BATCH, calls_of

STEPS = 5


def gradients(model: torch.nn.Module, step: int, part: int, parts: int) -> None:
    """Make this part's gradients, as a backward of a plain loop does."""
    model.zero_grad()
    x, y = models.batch("gpt", step, GLOBAL_BATCH, torch.float32)
    models.loss_of("gpt", model(x.chunk(parts)[part]), y.chunk(parts)[part]).backward()


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in models.gradients(model).values()])


def through_a_fault(model: torch.nn.Module, steps: int) -> Iterator[Tensor]:
    """Yield the averaged gradients of each step.

    In the midst one step is lost, with what its rounding left out, and made again.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        if step == 3:
            gradients(model, 7, rank, world)
            reducer = torch_modules.reducer_of(model)
            assert reducer is not None
            ddp_hook_state.here.restore(reducer)
        gradients(model, step, rank, world)
        ddp_hook_state.here.snapshot()
        yield flat(model)


def rounded(dtype: torch.dtype, *, feedback: bool) -> list[Tensor]:
    """Return each step's averaged gradient by the definition, in one process; weights stay."""
    world = dist.get_world_size()
    model = models.make("gpt", torch.float32)
    errors = [torch.zeros(()) for _ in range(world)]
    averaged = []
    for step in range(STEPS):
        sent = []
        for part in range(world):
            gradients(model, step, part, world)
            due = flat(model) / world + errors[part]
            sent.append(due.to(dtype))
            errors[part] = due - sent[-1] if feedback else errors[part]
        averaged.append(sum(sent[1:], sent[0]).float())
    return averaged


def rounding(method: str, *, feedback: bool) -> dict[str, Any]:
    """Return how far gradients are from the definition, and their sums from the truth."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[method]
    model = models.make("gpt", torch.float32)
    policy = Compress(method, error_feedback=feedback)  # type: ignore[arg-type]
    spread = parallelize(model, "ddp", policy)
    expected = rounded(dtype, feedback=feedback)
    exact = rounded(torch.float32, feedback=False)
    apart, total, truth = [], torch.zeros(()), torch.zeros(())
    for step, found in enumerate(through_a_fault(model, STEPS)):
        apart.append(float((found - expected[step]).abs().max()))
        total, truth = total + found, truth + exact[step]
    return {
        "apart": max(apart),
        "from the truth": float((total - truth).norm()),
        "explained": repr(spread.explain()),
    }


def bytes_of(*policies: object) -> tuple[float, float]:
    """Return bytes a rank sends in a step, as the tap counts, and as explained."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = models.make("gpt", torch.float32)
    spread = parallelize(model, "ddp", *policies)
    for step in range(4):  # PowerSGD starts at 2
        gradients(model, step, rank, world)
    called = calls_of(partial(gradients, model, 4, rank, world))
    sent = sum(collectives.sent_bytes(call.kind, call.bytes, world, "gloo") for call in called)
    return sent, spread.explain().sent_bytes


def power_sgd() -> dict[str, Any]:
    """Return by how much the loss falls, whole and with PowerSGD, and whether ranks stay alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for case, policies in (("whole", []), ("powersgd", [Compress("powersgd", rank=8, start=2)])):
        model = models.make("gpt", torch.float32)
        parallelize(model, "ddp", *policies)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(12):
            gradients(model, step, rank, world)
            opt.step()
            with torch.no_grad():
                x, y = models.batch("gpt", 99, GLOBAL_BATCH, torch.float32)
                losses.append(float(models.loss_of("gpt", model(x), y)))
        found[case] = losses[0] - losses[-1]
        everyone = [torch.empty_like(flat(model)) for _ in range(world)]
        dist.all_gather(everyone, torch.cat([p.detach().flatten() for p in model.parameters()]))
        found[f"{case} alike"] = all(torch.equal(w, everyone[0]) for w in everyone)
    return found


def refusals() -> dict[str, str]:
    texts = {}
    for label, layout, policies in (
        ("fsdp", "zero3", [Compress()]),
        ("two answers", "ddp", [Compress(), Precision("fp32", reduce="bf16")]),
        ("scale", "ddp", [Compress("bf16"), Precision("fp16")]),
    ):
        try:
            parallelize(models.make("gpt", torch.float32), layout, *policies)
        except LayoutError as error:
            texts[label] = str(error)
    return texts


def on_two_ranks() -> dict[str, Any]:
    """Everything that two ranks show, in one process group."""
    torch_live.here.watch()
    ddp_hook_state.here.watch()
    return {
        "bf16": rounding("bf16", feedback=True),
        "fp16": rounding("fp16", feedback=True),
        "bf16 alone": rounding("bf16", feedback=False),
        "bytes": {
            "bf16": bytes_of(Compress("bf16")),
            "powersgd": bytes_of(Compress("powersgd", rank=2, start=2)),
            "reduce": bytes_of(Precision("fp32", reduce="bf16")),
        },
        "powersgd": power_sgd(),
        "refusals": refusals(),
    }
