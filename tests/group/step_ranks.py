"""What the ranks run in test_step: batches of several inputs, of every form, under every layout."""

# B batch, T sequence, D model width, V vocabulary

from collections import UserDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout import verify_magic
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.policies import ContextParallel, Pipeline, TensorParallel
from nbdist.shared.errors import LayoutError
from tests.group.pipeline_ranks import furthest, gradients
from tests.group.tensor_parallel_ranks import Block, llama

V, T, D = 12, 8, 32


class Masked(nn.Module):
    """Takes token ids and a mask, and hands out two things, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(D, V)

    def forward(self, ids: Tensor, mask: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        x_BTD = self.token(ids) * mask[..., None] * scale
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return {"logits": self.head(x_BTD), "mask": mask}


class Stateful(nn.Module):
    """Its one argument is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * D, D)

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        return self.mix(torch.cat(state, -1))


class Worded(nn.Module):
    """Its one argument holds no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, V)

    def forward(self, words: str) -> Tensor:
        return self.head(torch.full((len(words), D), 0.5, dtype=torch.float64))


def make(kind: type[nn.Module] = Masked) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batch(samples: int = 8) -> tuple[dict[str, Any], dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (samples, T), generator=random)
    mask = (torch.rand(samples, T, generator=random) > 0.2).double()
    weight = torch.rand(samples, generator=random, dtype=torch.float64)
    return {"ids": ids, "mask": mask}, {"ids": ids.flip(1), "weight": weight}


def share(tree: dict[str, Tensor], sizes: list[int]) -> dict[str, Tensor]:
    """Return this rank's share: its parts of every tensor."""
    shard = data_shard()
    return {
        name: t.split(sizes if shard.count > 1 else len(t))[shard.index] for name, t in tree.items()
    }


def loss_of(out: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
    each = F.cross_entropy(out["logits"].transpose(1, 2), y["ids"], reduction="none")
    return (each.mean(1) * y["weight"]).mean()


FORMS = {
    "dict": lambda x: x,
    "a library's dict": UserDict,
    "tuple": lambda x: (x["ids"], x["mask"]),
    "list": lambda x: [x["ids"], x["mask"]],
    "dict with a number": lambda x: {"scale": 1.0, **x},
}
EXAMPLE = {name: t[:1] for name, t in batch()[0].items()}
LAYOUTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "ddp": ("ddp", ()),
    "zero3": ("zero3", ()),
    "tp": ("tp=2", (TensorParallel(example=EXAMPLE),)),
    "cp": ("cp=2", (ContextParallel(loss=True, example=EXAMPLE),)),
    "pp": ("pp=2", (Pipeline(microbatches=2, example=EXAMPLE),)),
}


def spread(name: str) -> Layout:
    layout, policies = LAYOUTS[name]
    return parallelize(make(), layout, *policies)


def expected(sizes: list[int]) -> dict[str, Tensor]:
    """Return the gradients of one process on all samples, each part of the weights counted once."""
    alone = make()
    x, y = batch(sum(sizes))
    loss_of(alone(**x), y).backward()
    return gradients(alone)


def steps() -> dict[tuple[str, str], float]:
    """Return how far a step's gradients are from one process, for each layout and form."""
    found = {}
    for layout in LAYOUTS:
        for form in FORMS if layout == "ddp" else ("dict", "tuple"):
            made = FORMS[form]
            sizes = [5, 3] if layout in ("ddp", "zero3") else [4, 4]
            live = spread(layout)
            x, y = (share(tree, sizes) for tree in batch())
            live.step(made(x), UserDict(y) if form == "a library's dict" else y, loss_of)
            found[layout, form] = furthest(gradients(live.model), expected(sizes))
    return found


def proofs() -> dict[str, tuple[bool, bool, str]]:
    """Return, for each layout, whether it was proven by hand, and from the notebook."""
    found = {}
    for name in LAYOUTS:
        live = spread(name)
        x, y = (share(tree, [4, 4]) for tree in batch())
        proof = live.verify((x, y), loss_of, steps=1)
        told = verify_magic.verify(
            None, {}
        )  # cp's loss of a part needs targets: after a step alone
        if live.policies.context.loss or name in ("ddp", "zero3"):
            live.step(x, y, loss_of)
            told = verify_magic.verify(None, {})
        found[name] = (proof.ok, bool(told.get("ok")), told.get("text", str(told.get("error"))))
    return found


def refused() -> dict[str, str]:
    """Return what is said of batches of which nothing is known, and of a model without example."""
    texts = {}
    try:
        parallelize(make(Worded), "ddp").step("a word", None, lambda out, _: out.mean())
    except LayoutError as error:
        texts["no tensor"] = str(error)
    live = parallelize(make(), "ddp")
    assert live.last_step is None
    texts["no example"] = str(verify_magic.verify(None, {}).get("error"))
    return texts


def of_a_tuple() -> float:
    """Step a model whose one argument is a tuple, given within one."""
    torch.manual_seed(2)
    x, y = torch.randn(6, 2, D).double().unbind(1), torch.randn(6, D).double()
    alone, live = make(Stateful), parallelize(make(Stateful), "zero2")
    F.mse_loss(alone(x), y).backward()
    rank = dist.get_rank()
    mine = tuple(half.split([4, 2])[rank] for half in x)
    live.step((mine,), y.split([4, 2])[rank], F.mse_loss)
    return furthest(gradients(live.model), gradients(alone))


def on_two_ranks() -> dict[str, Any]:
    """One group for all that two ranks prove."""
    return {"steps": steps(), "proofs": proofs(), "refused": refused(), "tuple": of_a_tuple()}


# ---- A model of transformers, with its own loss --------------------------------------------------


def of_transformers(layouts: list[str]) -> dict[str, float]:
    """Step a Llama by what a tokenizer and collator give; its own output has the loss."""
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(V, (8, T), generator=random)
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0  # padded alike, for the loss is a mean over tokens
    x = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    found = {}
    for layout in layouts:
        torch.manual_seed(0)
        alone = llama().double()
        torch.manual_seed(0)
        example = {name: t[:1] for name, t in x.items()}
        policies: list[Any] = [Pipeline(microbatches=2, example=example)] if "pp" in layout else []
        policies += [TensorParallel(example=example)] if "tp" in layout else []
        live = parallelize(llama().double(), layout, *policies)
        live.step(share(x, [4, 4]), None, lambda out, _: out.loss)
        alone(**x).loss.backward()
        found[layout] = furthest(gradients(live.model), gradients(alone))
    return found
