"""What the ranks run in test_policies: precision and checkpointing against one process."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.efficiency import ActivationCheckpoint, Precision
from nbdist.engine.layout.policies.policies import TensorParallel
from nbdist.shared.errors import LayoutError
from tests.group import models
from tests.group import tensor_parallel_ranks as cuttable
from tests.group.layout_ranks import GLOBAL_BATCH, STEPS, difference, state_of

Trained = tuple[list[float], dict[str, Tensor]]
Call = Callable[[nn.Module, Tensor], Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train(name: str, layout: str, *policies: object, dtype: torch.dtype = torch.float32) -> Trained:
    """Train as a plain loop does, this rank's part under `layout`."""
    model = models.make(name, dtype)
    spread = parallelize(model, layout, *policies)
    assert parallelize(model, layout, *policies) is spread
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    part, parts = spread.shape.data_part(dist.get_rank())
    losses = []
    for step in range(STEPS):
        x, y = models.batch(name, step, GLOBAL_BATCH, dtype)
        out = model(x.chunk(parts)[part])
        assert out.dtype == dtype, "the loss is to be made of whole numbers"
        loss = models.loss_of(name, out, y.chunk(parts)[part])
        spread.scaler.scale(loss).backward()
        spread.scaler.step(opt)
        spread.scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, state_of(model)


def one_process(name: str, parts: int, call: Call, *, scale: bool = False) -> Trained:
    """Train as one process does on the same split, with a forward of its own."""
    model = models.make(name, torch.float32)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=scale)
    losses = []
    for step in range(STEPS):
        x, y = models.batch(name, step, GLOBAL_BATCH, torch.float32)
        kept: list[Tensor] = []
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = models.loss_of(name, call(model, x_part), y_part)
            scaler.scale(loss).backward()  # in fp16 a share of it would be rounded otherwise
            kept = kept or [buffer.clone() for buffer in model.buffers()]
            losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= parts
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return losses, state_of(model)


def _plain(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def _autocast(dtype: torch.dtype) -> Call:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            out: Tensor = model(x)
        return out.float()

    return call


def _low_parameters(dtype: torch.dtype) -> Call:
    """The whole model in `dtype`, gradients added up in the parameters' own: FSDP2's way."""

    def call(model: nn.Module, x: Tensor) -> Tensor:
        low = {name: p.to(dtype) for name, p in model.named_parameters()}
        out: Tensor = functional_call(model, low, (x,))
        return out.float()

    return call


def _apart(found: Trained, expected: Trained) -> tuple[float, float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    in_losses = max(abs(a - b) for a, b in zip(found[0], expected[0][rank::world], strict=True))
    return in_losses, difference(found[1], expected[1])


def precisions(compute: str) -> dict[str, tuple[float, float]]:
    """Return how far layouts in low precision are from one process, and from one in full."""
    world, dtype = dist.get_world_size(), DTYPES[compute]
    low = Precision(compute)  # type: ignore[arg-type]
    has_scale = compute == "fp16"
    full = one_process("gpt", world, _plain)
    ddp = train("gpt", "ddp", low)
    zero3 = train("gpt", "zero3", low)
    return {
        "ddp": _apart(ddp, one_process("gpt", world, _autocast(dtype), scale=has_scale)),
        "zero3": _apart(zero3, one_process("gpt", world, _low_parameters(dtype), scale=has_scale)),
        "ddp in full": _apart(ddp, full),
        "zero3 in full": _apart(zero3, full),
    }


def reduced(layout: str) -> dict[str, Any]:
    """Return what one averaged gradient in bf16 is apart from what it is in float32."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = models.make("gpt", torch.float32)
    spread = parallelize(model, layout, Precision("fp32", reduce="bf16"))
    x, y = models.batch("gpt", 0, GLOBAL_BATCH, torch.float32)
    models.loss_of("gpt", model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
    found = {n: _whole(p.grad) for n, p in model.named_parameters()}

    alone = models.make("gpt", torch.float32)
    shares: list[dict[str, Tensor]] = []
    for x_part, y_part in zip(x.chunk(world), y.chunk(world), strict=True):
        alone.zero_grad()
        models.loss_of("gpt", alone(x_part), y_part).backward()
        shares.append({n: gradient.clone() for n, gradient in models.gradients(alone).items()})
    exact = {n: torch.stack([s[n] for s in shares]).mean(0) for n in found}
    rounded = {n: reduce(add, ((s[n] / world).bfloat16() for s in shares)).float() for n in found}
    return {
        "exact": difference(found, exact),
        "rounded": difference(found, rounded),
        "sent": spread.explain().sent_bytes,
        "explained": repr(spread.explain()),
    }


def _whole(gradient: Any) -> Tensor:
    full: Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.clone()


def checkpoints() -> dict[str, tuple[float, float]]:
    """Return how far layouts are apart from one process when blocks compute again."""
    world = dist.get_world_size()
    expected = {name: one_process(name, world, _plain) for name in ("gpt", "conv")}
    cases = {
        "gpt zero3 all": ActivationCheckpoint(),
        "gpt ddp selective": ActivationCheckpoint(selective=True),
        "conv zero3 selective": ActivationCheckpoint(selective=True),
        "conv ddp every second": ActivationCheckpoint(every=2),
    }
    found = {}
    for case, policy in cases.items():
        name, layout, _ = case.split(" ", 2)
        found[case] = _apart(train(name, layout, policy), expected[name])
    return found


def names_with_all_policies() -> dict[str, Any]:
    model = models.make("conv", torch.float32)
    names, keys = [n for n, _ in model.named_parameters()], list(model.state_dict())
    spread = parallelize(model, "zero3", Precision("bf16"), ActivationCheckpoint())
    again = parallelize(model, "zero3", ActivationCheckpoint(), Precision("bf16"))
    try:
        parallelize(model, "zero3", Precision("bf16"))
        other = "accepted"
    except LayoutError as error:
        other = str(error)
    return {
        "names": [n for n, _ in model.named_parameters()] == names,
        "keys": list(model.state_dict()) == keys,
        "again": again is spread,
        "other": other,
        "explained": repr(spread.explain()),
    }


def memory() -> dict[str, int]:
    """Count bytes kept for backward: outside of blocks, in them, and with checkpoints."""
    counted = {}
    for what in ("plain", "every", "selective"):
        model = models.make("gpt", torch.float32)
        policy = ActivationCheckpoint(selective=what == "selective")
        spread = parallelize(model, "ddp", *([] if what == "plain" else [policy]))
        x, y = models.batch("gpt", 0, 4, torch.float32)
        outside, inside = _Kept(), _Kept()
        if what == "plain":
            for block in model.get_submodule("blocks").children():
                _count_in(block, inside)
        with outside.hooks:
            loss = models.loss_of("gpt", model(x), y)
        counted[f"outside, {what}"] = outside.bytes(model)
        counted[f"inside, {what}"] = inside.bytes(model)
        counted[f"explained, {what}"] = sum(spread.explain().inputs.values())
        loss.backward()
    return counted


class _Kept:
    """What autograd keeps while its hooks are the innermost."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self.hooks = saved_tensors_hooks(self._pack, lambda kept: kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._tensors.append(tensor)
        return tensor

    def bytes(self, model: nn.Module) -> int:
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._tensors
        }
        return sum(size for place, size in sizes.items() if place not in own)


def _count_in(block: nn.Module, kept: _Kept) -> None:
    stack = ExitStack()
    block.register_forward_pre_hook(lambda *_: stack.enter_context(kept.hooks) and None)
    block.register_forward_hook(lambda *_: stack.close())


def overflow(layout: str) -> dict[str, Any]:
    """One rank alone finds an infinite gradient, in a part that others do not have."""
    torch.manual_seed(0)
    model = cuttable.make("gpt", torch.float32)
    spread = parallelize(model, layout, Precision("fp16"))
    # A norm's first, which all of tp hold: torch alone asks its axes, fsdp, and no others.
    opt = torch.optim.SGD(reversed(list(model.parameters())), lr=0.1)
    part, parts = spread.shape.data_part(dist.get_rank())
    x, y = (tensor.chunk(parts)[part] for tensor in cuttable.batch(0))
    scales, changes = [], []
    # A scale at which nothing else overflows.
    spread.scaler.scale(torch.zeros(()))
    spread.scaler.update(256.0)
    for breaks in (True, False):
        before = state_of(model)
        opt.zero_grad()
        spread.step(x, y, cuttable.loss_of)
        if breaks and dist.get_rank() == dist.get_world_size() - 1:
            gradient = model.get_parameter("blocks.1.mlp.up.weight").grad
            assert gradient is not None
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.fill_(float("inf"))
        spread.scaler.step(opt)
        spread.scaler.update()
        scales.append(spread.scaler.get_scale())
        changes.append(difference(before, state_of(model)))
    return {"scales": scales, "changes": changes}


def clipped(layout: str) -> list[tuple[float, float]]:
    """Return (norm, largest gradient after): in full, of scaled gradients, of unscaled ones."""
    found = []
    for case in ("full", "scaled", "unscaled"):
        model = models.make("gpt", torch.float32)
        policies = [] if case == "full" else [Precision("fp16")]
        spread = parallelize(model, layout, *policies)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = models.batch("gpt", dist.get_rank(), 4, torch.float32)
        if case != "full":
            spread.scaler.scale(torch.zeros(()))
            spread.scaler.update(64.0)
        spread.step(x, y, lambda out, y: models.loss_of("gpt", out, y))
        if case == "unscaled":
            spread.scaler.unscale_(opt)
        norm = float(spread.clip_grad_norm_(0.1))
        if case == "scaled":
            spread.scaler.unscale_(opt)
        largest = max(float(_whole(p.grad).abs().max()) for p in model.parameters())
        found.append((norm, largest))
    return found


def refusals() -> dict[str, str]:
    texts = {}
    half = models.make("gpt", torch.float16)
    flat = nn.Linear(2, 2)
    for label, model, policies in (
        ("half", half, (Precision("fp16"),)),
        ("no blocks", flat, (ActivationCheckpoint(),)),
        ("twice", flat, (Precision("bf16"), Precision("fp16"))),
        ("no axis", flat, (TensorParallel(),)),
    ):
        try:
            parallelize(model, "ddp", *policies)
        except LayoutError as error:
            texts[label] = str(error)
        assert torch_modules.reducer_of(model) is None, "refused before the model is touched"
    return texts


def on_two_ranks() -> dict[str, Any]:
    """Everything that two ranks show, in one process group."""
    return {
        "bf16": precisions("bf16"),
        "reduced ddp": reduced("ddp"),
        "reduced zero3": reduced("zero3"),
        "checkpoints": checkpoints(),
        "names": names_with_all_policies(),
        "memory": memory(),
        "clipped": clipped("zero3"),
        "refusals": refusals(),
    }
