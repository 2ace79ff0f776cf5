"""What the ranks run in test_unseen: gradients and hooks that FSDP2's own hooks do not see."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from nbdist.engine.compat import torch_sharded
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.shared.errors import LayoutError
from tests.group.layout_ranks import whole

STEPS = 3


def linear() -> nn.Module:
    """Return a model whose penalty's backward needs no weights, and so passes through no unit."""
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


def deep() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(4, 1)).double()


def samples() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()


def penalty(model: Any, x: Tensor, *, is_advised: bool) -> Tensor:
    """Return R1's: of the gradient that the samples get."""
    x = x.clone().requires_grad_()
    out = model(x)
    if is_advised:
        model.set_reshard_after_backward(False)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    if is_advised:
        model.set_reshard_after_backward(True)
    found = (slope - 1).square().sum(1).mean()
    return found + 0 * out.sum() if is_advised else found


def trained(
    make: Callable[[], nn.Module], layout: str, backward: Callable[[nn.Module, Tensor], None]
) -> dict[str, Tensor]:
    model, x = make(), samples()
    if layout:
        parallelize(model, layout)
        x = x.chunk(2)[dist.get_rank()]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        backward(model, x)
        opt.step()
        opt.zero_grad()
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def as_advised(make: Callable[[], nn.Module], layout: str) -> float:
    """Return how far a penalty's weights are from those of one process."""
    alone = trained(make, "", lambda m, x: penalty(m, x, is_advised=False).backward())
    live = trained(make, layout, lambda m, x: penalty(m, x, is_advised=True).backward())
    return distance(alone, live)


class Coder(nn.Module):
    """A model with a method beside forward, which may call it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 1)

    def encode(self, x: Tensor) -> Tensor:
        code: Tensor = self.encoder(x)
        return code

    def forward(self, x: Tensor, *, codes: bool = False) -> Tensor:
        out: Tensor = self.encode(x) if codes else self.decoder(self.encode(x))
        return out


def coder() -> nn.Module:
    torch.manual_seed(0)
    return Coder().double()


def a_method(spread: Layout, x: Tensor) -> None:
    with torch.no_grad():
        spread.model(x)
    spread.model.encode(x).square().mean().backward()  # type: ignore[operator]


def a_method_after_a_step(spread: Layout, x: Tensor) -> None:
    opt = spread.optimizer(torch.optim.SGD, lr=0.0)
    spread.model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()
    spread.model.encode(x).square().mean().backward()  # type: ignore[operator]
    opt.step()


def two_backwards(spread: Layout, x: Tensor) -> None:
    loss = spread.model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def two_after_two(spread: Layout, x: Tensor) -> None:
    first, second = spread.model(x).square().mean(), spread.model(x).abs().mean()
    first.backward()
    second.backward()


def twice_called(layout: str) -> float:
    """Return how far weights are from one process's, where each backward has its forward."""

    def backward(model: nn.Module, x: Tensor) -> None:
        for _ in range(2):
            model(x).square().mean().backward()

    return distance(trained(linear, "", backward), trained(linear, layout, backward))


def by_forward(layout: str) -> float:
    """Return how far weights are from one process's, where forward calls the method."""

    def backward(model: nn.Module, x: Tensor) -> None:
        # Of a replica all parameters have a gradient.
        loss = model(x, codes=True).square().mean()
        (
            loss + sum(0 * p.sum() for p in model.parameters()) if layout == "ddp" else loss
        ).backward()

    return distance(trained(coder, "", backward), trained(coder, layout, backward))


def gradients_by_hand() -> list[float]:
    """Return a replica's weights after two steps with one backward, and one with no backward."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    parallelize(model, "ddp")
    opt, weights = torch.optim.SGD(model.parameters(), lr=0.1), []
    (model.weight * 1.0).sum().backward()  # the same on all ranks
    for _ in range(2):
        opt.step()
        weights.append(model.weight.item())
    model.weight.grad = torch.full((1, 1), 2.0, dtype=torch.float64)
    opt.step()
    return [*weights, model.weight.item()]


def refused(
    layout: str, use: Callable[[Layout, Tensor], None], make: Callable[[], nn.Module] = linear
) -> tuple[str, bool]:
    """Return what a step says, and whether weights stayed."""
    spread = parallelize(make(), layout)
    before = spread.state_dict()
    opt = torch.optim.SGD(spread.model.parameters(), lr=0.1)
    try:
        use(spread, samples().chunk(2)[dist.get_rank()])
        opt.step()
        text = "accepted"
    except LayoutError as error:
        text = str(error)
    after = spread.state_dict()
    return text, all(torch.equal(before[name], after[name]) for name in before)


def a_penalty_alone(spread: Layout, x: Tensor) -> None:
    penalty(spread.model, x, is_advised=False).backward()


def parts_left_early(spread: Layout, x: Tensor) -> None:
    for _ in spread.accumulate(2):
        spread.model(x).sum().backward()
        break


def a_hook(spread: Layout, x: Tensor) -> None:
    spread.model.get_parameter("weight").register_hook(lambda gradient: gradient * 2)
    spread.model(x).sum().backward()


def hooked_before(layout: str) -> str:
    model = linear()
    model.get_parameter("bias").register_hook(lambda gradient: gradient * 2)
    try:
        parallelize(model, layout)
    except LayoutError as error:
        return str(error)
    return "accepted"


def doubled(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def by_the_advised_hook(layout: str) -> float:
    """Return how far weights are from one process's, where both double a gradient in a hook."""
    hooked: list[nn.Module] = []

    def backward(model: nn.Module, x: Tensor) -> None:
        weight = model.get_parameter("3.weight")
        if model not in hooked:
            hooked.append(model)
            if isinstance(model, FSDPModule):
                weight.register_post_accumulate_grad_hook(doubled)
            else:
                weight.register_hook(lambda gradient: gradient * 2)
        model(x).square().mean().backward()

    return distance(trained(deep, "", backward), trained(deep, layout, backward))


def looks_in_a_plain_training() -> int:
    """Return how often steps have looked at gradients, parameter by parameter."""
    looks = []
    gc.collect()  # models that are gone, and were refused, have no say in this one

    def look(*given: Any) -> list[Any]:
        looks.append(given)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sharded, "trained", look)
        trained(deep, "zero3", lambda model, x: model(x).square().mean().backward())
    return len(looks)


def looked_at_between(layout: str) -> float:
    """Return how far weights are from one process's, with forwards alone between all else."""

    def backward(model: nn.Module, x: Tensor) -> None:
        look(model, x)
        model(x).square().mean().backward()
        look(model, x)

    def look(model: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            model(x)

    return distance(trained(deep, "", backward), trained(deep, layout, backward))


def trained_after_a_look(layout: str) -> float:
    """The same with an optimizer, and weights set to zero, that come after a forward alone."""

    def weights(layout: str) -> dict[str, Tensor]:
        model, x = deep(), samples()
        if layout:
            parallelize(model, layout)
            x = x.chunk(2)[dist.get_rank()]
        with torch.no_grad():
            model(x)
            for parameter in model.parameters():
                parameter.mul_(0.5)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
        return {name: whole(tensor) for name, tensor in model.state_dict().items()}

    return distance(weights(""), weights(layout))


def on_two_ranks() -> dict[str, Any]:
    """One group for all that two ranks prove."""
    layouts = ("zero2", "zero3")
    uses = (a_penalty_alone, parts_left_early, a_hook)
    calls = (a_method, a_method_after_a_step)
    return {
        "uncalled": {
            (call.__name__, lay): refused(lay, call, coder)
            for call in calls
            for lay in ("ddp", "zero1")
        },
        "twice": [
            refused(lay, use) for use in (two_backwards, two_after_two) for lay in ("ddp", "zero1")
        ],
        "twice called": twice_called("ddp"),
        "called": [by_forward(lay) for lay in ("ddp", *layouts)],
        "by hand": gradients_by_hand(),
        "refused": {(use.__name__, lay): refused(lay, use) for use in uses for lay in layouts},
        "advised": [as_advised(make, lay) for make in (linear, deep) for lay in layouts],
        "hooked before": [hooked_before(layout) for layout in layouts],
        "hooked": [by_the_advised_hook(layout) for layout in layouts],
        "looks": looks_in_a_plain_training(),
        "between": [looked_at_between(layout) for layout in layouts],
        "after": [trained_after_a_look(layout) for layout in layouts],
    }
