"""What the ranks run in tests of publish: models from layouts into programs."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine.layout import publish as publishing
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.publish import publish
from nbdist.shared.errors import NBDistError
from tests.group import models
from tests.group.pretrained_ranks import Stages


def into(folder: str, *, tracked: bool = True) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    publishing.here.place = publishing.PublishTarget(Path(folder), told.append, lambda: tracked)
    return told


def published(folder: str, layout: str) -> tuple[list[dict[str, Any]], list[Any], str]:
    """Train a step, publish; return what is told, and what the plain model makes of the request."""

    def factory() -> nn.Module:
        torch.manual_seed(3)
        return Stages()

    told = into(folder)
    spread = parallelize(factory, layout)
    x, y = models.batch("gpt", 0, 4, torch.float32)
    spread.step(x, y, lambda out, y: models.loss_of("gpt", out, y))
    result = publish(spread.model, "small", alias="best")
    state = spread.state_dict()
    expected: list[Any] = []
    if dist.get_rank() == 0:
        plain = factory().eval()
        plain.load_state_dict(state)
        request = json.loads((Path(told[0]["folder"]) / "example.json").read_text())
        with torch.no_grad():
            expected = plain(torch.tensor(request["inputs"])).tolist()
    return told, expected, repr(result)


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.sum()) > 0 else x


class Random(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(4)


def refused(folder: str) -> dict[str, str]:
    told = into(folder)
    plain, x = nn.Linear(4, 4), torch.ones(3, 4)
    cases: dict[str, tuple[Any, str, Any]] = {
        "decides": (Decides(), "a", x),
        "random": (Random(4, 4), "a", x),
        "shape": (plain, "a", torch.ones(3, 5)),
        "text": (plain, "a", "a batch"),
        "two": (plain, "a", (x, x)),
        "none": (plain, "a", None),
        "empty": (plain, "a", torch.ones(0, 4)),
        "name": (plain, "a/b", x),
    }
    texts = {}
    for label, (model, name, example) in cases.items():
        texts[label] = _text_of(model, name, example)
    for alias in ("v1", "Latest", "best model"):
        texts[alias] = _text_of(plain, "a", x, alias)
    into(folder, tracked=False)
    texts["untracked"] = _text_of(plain, "a", x)
    publishing.here.place = None
    texts["elsewhere"] = _text_of(plain, "a", x)
    assert not told
    return texts


def _text_of(model: nn.Module, name: str, example: Any, alias: str | None = None) -> str:
    try:
        publish(model, name, alias=alias, example=example)
    except NBDistError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def lengths(folder: str) -> list[list[int]]:
    """Return of two published programs which of their inputs' dims take any size."""
    told = into(folder)
    for model in (Stages(), models.GPT()):  # the second adds a table of 12 positions
        publish(model, "any", example=torch.arange(12).view(1, 12))
    return [list(one["inputs"][1]) for one in told]


def run_program(folder: str) -> list[float]:
    """Run a program as a server does, on the request that lies beside it."""
    program = torch.export.load(f"{folder}/data/model.pt2").module()
    request = json.loads((Path(folder) / "example.json").read_text())
    found: list[float] = program(torch.tensor(request["inputs"])).detach().flatten().tolist()
    return found
