"""What the ranks run in test_factory: models that a function makes, and what ranks hold of them."""

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.weights import full_tensors
from nbdist.shared.errors import LayoutError
from tests.group import models
from tests.group import tensor_parallel_ranks as tensor_parallel


class Held(TorchDispatchMode):
    """Counts the bytes of storages that are alive, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and type(tensor) is Tensor and not tensor.is_meta:
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        self._known[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)


def gpt() -> nn.Module:
    return models.make("gpt", torch.float32, seed=5 + dist.get_rank())


def conv() -> nn.Module:
    return models.make("conv", torch.float32, seed=5 + dist.get_rank())


def parallel() -> nn.Module:
    return tensor_parallel.make("gpt", torch.float32, seed=5 + dist.get_rank())


MINE = 0.51  # of the model, on each of two ranks that share it


class Large(nn.Module):
    """Twelve equal blocks; one is 8 % of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)) for _ in range(12)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def state(layout: Layout) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in full_tensors.tensors(layout)}


def made_alike(factory: Callable[[], nn.Module], layouts: list[str]) -> dict[str, bool]:
    """Compare with the same model built first; again and again, as a cell does."""
    direct = state(parallelize(factory(), "ddp"))
    found = {}
    for text in layouts:
        spread = parallelize(factory, text)
        mine = state(spread)
        found[text] = all(torch.equal(mine[n], direct[n]) for n in direct) and len(mine) == len(
            direct
        )
        found[f"{text} trains"] = all(
            p.requires_grad and not p.is_meta for p in spread.model.parameters()
        )
    return found


def first_loss(layout: str) -> tuple[float, float]:
    x, y = models.batch("gpt", 0, 4, torch.float32)
    losses = []
    for model in (gpt(), gpt):
        spread = parallelize(model, layout)
        loss = spread.step(x, y, lambda out, y: models.loss_of("gpt", out, y))
        assert loss is not None
        losses.append(float(loss))
        assert spread.model.get_parameter("head.weight") is spread.model.get_parameter(
            "token.weight"
        )
    return losses[0], losses[1]


def most_held() -> tuple[float, float]:
    """Return the most that a rank held, and what it holds at the end, in units of the model."""
    total = sum(p.nbytes for p in Large().to("meta").parameters())
    with Held() as held:
        spread = parallelize(Large, "fsdp=2")
        assert spread.model is not None
        # gloo's thread lets go of what it has broadcast a moment after the ranks go on.
        until = time.monotonic() + 20
        while held.now > MINE * total and time.monotonic() < until:
            time.sleep(0.001)
    return held.most / total, held.now / total


def random_numbers() -> tuple[bool, bool]:
    """Say whether ranks draw on as after building the model themselves, and the same."""
    torch.manual_seed(3)
    models.GPT()
    expected = torch.rand(3)
    torch.manual_seed(3)
    parallelize(models.GPT, "zero3")
    found = torch.rand(3)
    everyone = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, found)
    return torch.equal(found, expected), all(torch.equal(found, other) for other in everyone)


def refused() -> dict[str, str]:
    texts = {}

    def reads_weights() -> nn.Module:
        model = nn.Linear(4, 4)
        model.in_features = int(model.weight.std().item())
        return model

    def fails() -> nn.Module:
        raise ValueError("no such size")

    factories: dict[str, Callable[[], Any]] = {
        "reads": reads_weights,
        "fails": fails,
        "none": dict,
    }
    for label, factory in factories.items():
        try:
            parallelize(factory, "zero3")
        except LayoutError as error:
            texts[label] = str(error)
    return texts


def on_two_ranks() -> dict[str, Any]:
    return {
        "gpt": made_alike(gpt, ["zero3", "ddp", "zero2"]),
        "conv": made_alike(conv, ["zero3", "pp=2"]),
        "parallel": made_alike(parallel, ["tp=2"]),
        "loss": first_loss("zero3"),
        "held": most_held(),
        "random": random_numbers(),
        "refused": refused(),
    }
