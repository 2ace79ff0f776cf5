"""Which tensor of a folder each weight of a model is, or why none is."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nbdist.engine.layout.weights.pretrained_folder import Match, match
from nbdist.engine.layout.weights.safetensors_file import StoredTensor
from nbdist.shared.errors import CheckpointError


class Body(nn.Module):
    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 3, bias=False)
        self.register_buffer("mask", torch.ones(2), persistent=False)


class WithHead(nn.Module):
    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(3, 4, bias=False)


UP, HEAD = {"up.weight": (3, 2)}, {"head.weight": (4, 3)}
LONG = {"body.up.weight": (3, 2)}


def found(model: nn.Module, shapes: dict[str, tuple[int, ...]], **options: list[str]) -> Match:
    stored = {
        name: StoredTensor(Path(name), torch.float32, shape, 0) for name, shape in shapes.items()
    }
    return match(model, stored, **options)


def sources(result: Match) -> dict[str, str]:
    return {name: str(tensor.path) for name, tensor in result.stored.items()}


@pytest.mark.parametrize(
    ("model", "shapes", "expected", "new", "left"),
    [
        (Body(), UP, {"up.weight": "up.weight"}, (), ()),
        (Body(), LONG | HEAD, {"up.weight": "body.up.weight"}, (), ("head.weight",)),
        (WithHead(), UP, {"body.up.weight": "up.weight"}, ("head.weight",), ()),
        (
            WithHead(),
            LONG | {"other.weight": (5,)},
            {"body.up.weight": "body.up.weight"},
            ("head.weight",),
            ("other.weight",),
        ),
        (Body(), UP | {"mask": (2,)}, {"up.weight": "up.weight"}, (), ("mask",)),
    ],
    ids=["the same", "the body of a model", "a body for a model", "another head", "a constant"],
)
def test_a_body_is_found_with_and_without_its_prefix(
    model: nn.Module,
    shapes: dict[str, tuple[int, ...]],
    expected: dict[str, str],
    new: tuple[str, ...],
    left: tuple[str, ...],
) -> None:
    result = found(model, shapes)
    assert sources(result) == expected
    assert (result.new, result.left) == (new, left)


@pytest.mark.parametrize(
    ("model", "shapes", "words"),
    [
        (Body(), {}, "1 missing (up.weight)"),
        (Body(), UP | {"down.weight": (1,)}, "1 not the model's (down.weight)"),
        (Body(), LONG | {"body.down.weight": (1,)}, "1 not the model's (body.down.weight)"),
        (Body(), {"up.weight": (9, 2)}, "up.weight is (9, 2) and must be (3, 2)"),
        (WithHead(), HEAD | {"body.x": (1,)}, "1 missing (body.up.weight)"),
        (nn.Linear(2, 2), {"weight": (2, 2)}, "1 missing (bias)"),
    ],
)
def test_what_is_missing_too_much_or_of_another_shape_is_named(
    model: nn.Module, shapes: dict[str, tuple[int, ...]], words: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        found(model, shapes)
    assert words in error.value.what
    assert "nothing was loaded" in error.value.why


def test_what_is_named_as_new_may_be_missing_or_of_another_shape_but_is_read_if_it_fits() -> None:
    assert found(nn.Linear(2, 2), {"weight": (2, 2)}, new=["bias"]).new == ("bias",)
    shapes: dict[str, tuple[int, ...]] = {"weight": (2, 2), "bias": (7,)}
    assert found(nn.Linear(2, 2), shapes, new=["*"]).new == ("bias",)
    result = found(nn.Linear(2, 2), {"weight": (2, 2), "bias": (2,)}, new=["*"])
    assert (result.new, len(result.stored)) == ((), 2)


def test_what_is_skipped_is_as_if_it_were_not_there() -> None:
    shapes: dict[str, tuple[int, ...]] = {"weight": (2, 2), "bias": (2,), "old": (1,)}
    result = found(nn.Linear(2, 2), shapes, skip=["old", "bias"], new=["bias"])
    assert (result.new, result.left) == (("bias",), ("bias", "old"))


def test_tied_weights_are_read_by_whichever_name_the_folder_has() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    for name in ("0.weight", "1.weight"):
        result = found(model, {name: (2, 2)})
        assert sources(result) == {"0.weight": name}
        assert result.aliases == {"0.weight": ("0.weight", "1.weight")}
