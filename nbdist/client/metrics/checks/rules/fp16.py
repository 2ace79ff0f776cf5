"""Rules on float16, whose small gradients need a scaled loss."""

from nbdist.client.metrics.checks.planting import DDP, both, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Uses, where_told


@where_told("half")
def _forgets_to_scale(seen: Seen) -> str:
    bare = [
        step
        for step in seen.steps
        if all(step.of("half").get(rank) for rank in step.by_rank)
        and not any(step.of("scalers").values())
    ]
    if len(bare) < 2:
        return ""
    return (
        "The model computes in fp16 and its loss is not scaled, so small gradients become 0. "
        "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update() scale it, with "
        'layout.scaler where Precision("fp16") is given, else a torch.amp.GradScaler; bf16 needs '
        "none."
    )


_IN = """with torch.autocast("cpu", torch.{}):
    loss = model(x).square().mean()
loss.backward()"""

UNSCALED_FP16 = Rule(
    "unscaled-fp16",
    "the model computes in float16, and no loss is scaled",
    Uses,
    _forgets_to_scale,
    remedy="Scale the loss by a GradScaler, or compute in bfloat16.",
    planted=both("use", (1, 2), half=1, scalers=0),
    sound=both("use", (1, 2), half=1, scalers=1),
    example=training(backward=_IN.format("float16")),
    mended=training(backward=_IN.format("bfloat16")),
    sources=(
        "https://github.com/engichang1467/Open-Rig3R/issues/35",
        "https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling",
    ),
)


@where_told("scaled")
def _steps_past_the_scaler(seen: Seen) -> str:
    scaled = [step for step in seen.steps if all(step.of("scaled").get(r) for r in step.by_rank)]
    past = [step for step in scaled if not any(step.of("unscaled").values())]
    if len(past) < 2:
        return ""
    return (
        "The loss is scaled and the optimizer steps with gradients that still are: thousands of "
        "times too large, and overflows count. scaler.step(optimizer) and scaler.update() in the "
        "place of optimizer.step() divide them, and leave a step with an overflow out."
    )


_SCALED = f"""{DDP}
scaler = torch.amp.GradScaler("cpu")"""
_BACKWARD = "scaler.scale(model(x).square().mean()).backward()"


@where_told("clipped_scaled")
def _clips_what_is_scaled(seen: Seen) -> str:
    clipped = [step for step in seen.steps if all(map(step.of("clipped_scaled").get, step.by_rank))]
    if len(clipped) < 2:
        return ""
    return (
        "Gradients are clipped while the scale of a GradScaler is in them, as at step "
        f"{clipped[-1].number:,}: they are thousands of times as large there, so that "
        "clip_grad_norm_ cuts each step, and then to a norm that is as many times too small. Call "
        "scaler.unscale_(optimizer) before it."
    )


_CLIPPED = f"{_BACKWARD}\n{{}}torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def _scaled(backward: str) -> str:
    """Return a cell whose optimizer steps by its scaler."""
    return training(_SCALED, backward=backward).replace(
        "optimizer.step()", "scaler.step(optimizer)\n    scaler.update()"
    )


CLIPPED_WHILE_SCALED = Rule(
    "clipped-while-scaled",
    "gradients are clipped before a GradScaler has divided them by its scale",
    Uses,
    _clips_what_is_scaled,
    remedy="Call scaler.unscale_(optimizer) before gradients are clipped.",
    planted=both("use", (2, 5), clipped_scaled=1),
    sound=both("use", (2, 5), clipped_scaled=0),
    example=_scaled(_CLIPPED.format("")),
    mended=_scaled(_CLIPPED.format("scaler.unscale_(optimizer)\n")),
    sources=(
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/9599",
        "https://github.com/milesial/Pytorch-UNet/issues/468",
    ),
)

STEP_PAST_SCALER = Rule(
    "step-past-scaler",
    "the loss is scaled, and the optimizer steps with gradients that still are",
    Uses,
    _steps_past_the_scaler,
    remedy="Step by the scaler, which divides gradients by its scale first.",
    planted=both("use", (1, 2), scaled=1, unscaled=0),
    sound=both("use", (1, 2), scaled=1, unscaled=1),
    example=training(_SCALED, backward=_BACKWARD),
    mended=training(_SCALED, backward=_BACKWARD).replace(
        "optimizer.step()", "scaler.step(optimizer)\n    scaler.update()"
    ),
    sources=(
        "https://github.com/IAHispano/Applio/pull/860",
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
    ),
)
