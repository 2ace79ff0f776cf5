"""Inputs are found where a model's first layers, or the model itself, tell them."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from nbdist.engine.layout.plan.guesses import guesses  # noqa: E402
from nbdist.engine.layout.plan.trace import find_inputs  # noqa: E402


class EncoderDecoder(nn.Module):
    """Takes two texts, as models of transformers do, which tell so by `dummy_inputs`."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.dummy_inputs = {name: torch.tensor([[1, 2]]) for name in ("input_ids", "target_ids")}

    def forward(self, input_ids: object, target_ids: object) -> object:
        return self.out(self.words(input_ids) + self.words(target_ids))


class OfTimm(nn.Module):
    """Takes images of one size, which it tells as timm's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.default_cfg = {"input_size": (3, 48, 48)}
        self.out = nn.Linear(3 * 48 * 48, 4)

    def forward(self, x_BCHW: Any) -> Any:
        return self.out(x_BCHW[:, :, :48, :48].flatten(1))


class Experts(nn.Module):
    """Multiplies rows by an expert each, in the dtype of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 16, 16))
        self.out = nn.Linear(16, 4)

    def forward(self, x_BD: Any) -> Any:
        ends = torch.tensor([1, len(x_BD)], dtype=torch.int32)
        return self.out(torch._grouped_mm(x_BD, self.up, offs=ends))


def test_what_a_model_tells_of_its_inputs_is_tried_last() -> None:
    found, _ = find_inputs(EncoderDecoder(), None)
    assert set(found.keywords) == {"input_ids", "target_ids"}
    assert len(list(guesses(EncoderDecoder()))) > 1


def test_the_size_of_images_is_taken_from_a_model_of_timm() -> None:
    found, _ = find_inputs(OfTimm(), None)
    assert found.args[0].shape == (2, 3, 48, 48)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no such product")
def test_products_in_groups_are_traced_in_the_model_s_own_dtype() -> None:
    found, calls = find_inputs(Experts(), torch.randn(4, 16))
    assert found.args[0].dtype is torch.float32
    assert [call.name for call in calls] == ["", "out"]
