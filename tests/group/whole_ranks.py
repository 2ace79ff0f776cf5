"""What the ranks run in test_whole: weights whole, copied between layouts, and skeletons."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.weights import full_tensors
from nbdist.shared.errors import LayoutError
from tests.group import models
from tests.group import pipeline_ranks as pipelined
from tests.group import tensor_parallel_ranks as tensor_parallel

LAYOUTS = ("ddp", "zero2", "zero3")


def make(name: str, seed: int = 0) -> nn.Module:
    if name in ("gpt", "conv"):
        return models.make(name, torch.float32, seed)
    return tensor_parallel.make("gpt", torch.float32, seed)


def plain_state(name: str, seed: int = 0) -> dict[str, Tensor]:
    model = make(name, seed)
    return {key: t.detach().clone() for key, t in full_tensors.names(model).items()}


def same(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(state) == list(other) and all(torch.equal(state[n], other[n]) for n in state)


def copies(name: str, layouts: list[str]) -> dict[str, bool]:
    """Hand weights from layout to layout, and back into a plain module; each must have them all."""
    expected = plain_state(name, seed=7)
    found = {}
    source: Any = make(name, seed=7 + dist.get_rank())  # rank 0's count
    for layout in layouts:
        spread = parallelize(make(name, seed=dist.get_rank()), layout)
        spread.load_from(source)
        held = {n: t.clone() for n, t in full_tensors.tensors(spread)}
        if spread.shape.pp > 1:  # in the order of stages, parameters and buffers of each
            assert held.keys() == expected.keys()
            held = {name: held[name] for name in expected}
        found[layout] = same(held, expected) and is_saved(spread.state_dict(), name, expected)
        # Of a state it is rank 0's that counts, and others have none.
        source = spread if len(found) % 2 else spread.state_dict()
    return found


def is_saved(state: dict[str, Tensor], name: str, expected: dict[str, Tensor]) -> bool:
    """Say whether rank 0 has what a plain model loads and is bit by bit, and others nothing."""
    if dist.get_rank():
        return state == {}
    plain = make(name, seed=9)
    keys, storages = list(plain.state_dict()), {t.data_ptr() for t in state.values()}
    plain.load_state_dict(state)
    loaded = {key: tensor.detach() for key, tensor in full_tensors.names(plain).items()}
    saved = {key: tensor for key, tensor in loaded.items() if key in keys}
    return (
        list(state) == keys
        and len(storages) == len(saved)  # tied ones are one tensor
        and same(loaded, expected)
    )


class TiedLate(pipelined.GPT):
    """Ties two weights that both lie in the last stage, and has state of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LayerNorm(pipelined.D)
        self.last.weight = self.norm.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT) + self.position[: x_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.last(self.norm(x_BTD)))

    def get_extra_state(self) -> dict[str, int]:
        return {"made by": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"made by": 1}


def saves_a_pipeline() -> tuple[list[str], list[str]]:
    """Return the keys that were saved, and those of the plain model; values are compared here."""
    torch.manual_seed(4)
    plain = TiedLate()
    torch.manual_seed(4)
    state = parallelize(TiedLate(), "pp=2").state_dict()
    expected = plain.state_dict()
    if state:
        plain.load_state_dict(state)
    assert all(torch.equal(state[k], expected[k]) for k in state if k != "_extra_state")
    return list(state), list(expected)


def loads_between_steps(layout: str) -> list[bool]:
    """Weights that are loaded count in the next forward, also where the last one gathered."""
    x, y = models.batch("gpt", 0, 4, torch.float32)
    source = models.make("gpt", torch.float32, seed=3)
    expected = source(x)
    found = []
    model = models.make("gpt", torch.float32)
    spread = parallelize(model, layout)
    for _ in range(2):
        with torch.no_grad():
            model(x)
        spread.load_from(source if dist.get_rank() == 0 else None)
        found.append(torch.equal(model(x), expected))
        models.loss_of("gpt", model(x), y).backward()
    return found


def refused() -> dict[str, Any]:
    texts: dict[str, Any] = {}
    spread = parallelize(models.make("gpt", torch.float32), "zero3")
    before = {n: t.clone() for n, t in full_tensors.tensors(spread)}

    def load(label: str, other: Any) -> None:
        try:
            spread.load_from(other)
        except LayoutError as error:
            texts[label] = str(error)
        else:
            texts[label] = "accepted"

    state = models.make("gpt", torch.float32, seed=1).state_dict()
    load("missing", {key: state[key] for key in state if not key.startswith("blocks.1.")})
    load("unexpected", {**state, "extra": torch.zeros(1)})
    load("shape", {**state, "norm.weight": torch.zeros(3)})
    load("other model", models.make("conv", torch.float32))
    load("other layout", parallelize(models.make("conv", torch.float32), "ddp"))
    load("parts", spread.model.state_dict())
    load("a number", 3)
    texts["unchanged"] = same({n: t.clone() for n, t in full_tensors.tensors(spread)}, before)
    load("state dict", state)
    return texts


def loads_by_torch(layout: str) -> dict[str, Any]:
    """Load a plain state by torch's ways; return its refusal, and which of them worked."""
    spread = parallelize(pipelined.make("gpt", torch.float32), layout)
    before = {n: t.clone() for n, t in full_tensors.tensors(spread)}
    state = pipelined.make("gpt", torch.float32, seed=1).state_dict()
    found: dict[str, Any] = {}
    with torch.no_grad():
        spread.step(*pipelined.batch("gpt", 0, torch.float32), pipelined.loss_of)
    for label, model, given in (
        ("alone", spread.model, state),
        ("inside", nn.ModuleDict({"net": spread.model}), {f"net.{k}": state[k] for k in state}),
    ):
        try:
            model.load_state_dict(given)
        except LayoutError as error:
            found[label] = str(error)
    found["unchanged"] = same({n: t.clone() for n, t in full_tensors.tensors(spread)}, before)
    found["its own"] = str(spread.model.load_state_dict(spread.model.state_dict()))
    if spread.shape.pp == 1:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(spread.model, dict(state), options=options)
        after = {n: t.clone() for n, t in full_tensors.tensors(spread)}
        found["by torch's checkpoints"] = all(torch.equal(after[key], state[key]) for key in state)
    return found


def skeletons() -> dict[str, Any]:
    """Say of skeletons what they are."""
    model = models.make("conv", torch.float32)
    model.marked = model.get_parameter("head.weight")
    spread = parallelize(model, "zero3")
    plain = spread.skeleton
    assert plain is not None
    tied = parallelize(models.make("gpt", torch.float32), "zero3").skeleton
    assert tied is not None
    whole_size = sum(p.nbytes for p in plain.parameters())
    return {
        "on meta": all(p.is_meta for p in plain.parameters()),
        "plain": type(plain) is models.ConvNet,
        "names": [n for n, _ in plain.named_parameters()]
        == [n for n, _ in model.named_parameters()],
        "whole size": whole_size == spread.size.parameter_bytes,
        "buffers": [b.is_meta for b in plain.buffers()].count(True),
        "of its own": not {id(b) for b in plain.buffers()} & {id(b) for b in model.buffers()},
        "tied": tied.get_submodule("head").weight is tied.get_submodule("token").weight,
        "tied inside": plain.marked is plain.get_submodule("head").weight,
    }


def uncopied() -> tuple[Any, str, str]:
    model = models.make("gpt", torch.float32)
    model.group = dist.group.WORLD  # type: ignore[assignment]
    spread = parallelize(model, "ddp")
    return spread.skeleton, spread.no_skeleton, spread.name


def on_two_ranks() -> dict[str, Any]:
    """One group for all that two ranks prove."""
    return {
        "statistics": copies("conv", ["zero3", "pp=2", "ddp", "pp=2", "zero2"]),
        "between steps": {layout: loads_between_steps(layout) for layout in LAYOUTS},
        "refused": refused(),
        "by torch": {name: loads_by_torch(name) for name in ("zero3", "tp=2", "pp=2")},
        "skeletons": skeletons(),
        "uncopied": uncopied(),
        "pipeline": saves_a_pipeline(),
        "factory": is_saved(
            parallelize(lambda: make("gpt", 7), "zero3").state_dict(), "gpt", plain_state("gpt", 7)
        ),
    }
