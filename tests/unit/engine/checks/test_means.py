"""Of a loss that is a mean over what is kept it is told over how much, and what one counts."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nbdist.engine.checks.means import Means

KEEP = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])  # 3 of 8
OUT = torch.ones(2, 4, requires_grad=True)
LOGITS = torch.zeros(8, 5, requires_grad=True)
TARGETS = torch.tensor([1, 2, -100, -100, 3, -100, -100, -100])  # 3 of 8
OF_THREE = {"counted": 3.0, "each": pytest.approx(1 / 3)}


def told(*losses: Tensor, gradient: Tensor | None = None) -> dict[str, float]:
    """Return what is told of a step with these backwards."""
    means = Means()
    for loss in losses:
        means.backward_begins(loss, gradient)
    return means.take()


def test_cross_entropy_over_labels_that_are_not_ignored() -> None:
    assert told(F.cross_entropy(LOGITS, TARGETS)) == OF_THREE
    of_pixels = F.cross_entropy(LOGITS.T.unsqueeze(0), TARGETS.unsqueeze(0))
    assert told(of_pixels) == OF_THREE
    assert told(F.cross_entropy(LOGITS.bfloat16(), TARGETS).float()) == OF_THREE


@pytest.mark.parametrize(
    "loss",
    [
        (OUT * KEEP).sum() / KEEP.sum(),
        -(OUT * KEEP).sum() / KEEP.sum(),
        (-(OUT * KEEP)).sum() / KEEP.sum(),
        (KEEP * OUT).sum() / KEEP.sum(),
        (OUT * KEEP.bool()).sum() / KEEP.bool().sum(),
        (OUT * KEEP).sum() / int(KEEP.sum()),
        (OUT * KEEP).sum() / (KEEP.sum() + 1e-6),
        (OUT * KEEP).sum() / KEEP.sum().clamp(min=1),
        (OUT.bfloat16() * KEEP.bfloat16()).sum() / KEEP.bfloat16().sum(),
    ],
)
def test_a_masked_mean_by_hand(loss: Tensor) -> None:
    assert told(loss) == {"counted": pytest.approx(3), "each": pytest.approx(1 / 3)}


def masked() -> Tensor:
    return (OUT * KEEP).sum() / KEEP.sum()


def test_what_the_mean_is_multiplied_with_and_divided_by_is_in_what_one_counts() -> None:
    assert told(masked() / 4) == {"counted": 3, "each": pytest.approx(1 / 12)}
    assert told(1024 * masked()) == {"counted": 3, "each": pytest.approx(1024 / 3)}
    assert told(masked() * torch.tensor(3.0)) == {"counted": 3, "each": pytest.approx(1)}
    assert told(masked(), gradient=torch.tensor(6.0)) == {"counted": 3, "each": pytest.approx(2)}


def test_several_backwards_of_a_step_are_one_sum() -> None:
    whole = OUT * torch.ones(2, 4)
    second = whole.sum() / torch.ones(2, 4).sum()
    assert told(masked()) == OF_THREE
    assert told(masked() / 2, F.cross_entropy(LOGITS, TARGETS) / 2) == {
        "counted": 6,
        "each": pytest.approx(1 / 6),
    }
    assert told(masked(), second * 2)["counted"] == 11


@pytest.mark.parametrize(
    "loss",
    [
        OUT.sum(),
        OUT.mean(),
        OUT.square().mean(),
        (OUT * KEEP).sum(),
        (OUT * KEEP).sum() / 8,  # by all there are, kept or not
        (OUT * KEEP * 0.5).sum() / KEEP.sum() + OUT.mean(),
        (OUT * (KEEP * 0.3)).sum() / (KEEP * 0.3).sum(),
        (OUT * OUT).sum() / KEEP.sum(),
        F.cross_entropy(LOGITS, TARGETS, reduction="sum"),
        F.cross_entropy(LOGITS, TARGETS, reduction="sum") / 3,
        F.cross_entropy(LOGITS, TARGETS, weight=torch.rand(5)),
        F.cross_entropy(LOGITS, TARGETS, label_smoothing=0.1),
        F.cross_entropy(LOGITS, TARGETS) + OUT.mean(),
        masked() * OUT.mean(),
        masked() * torch.tensor([1.0, 2.0]),
        F.cross_entropy(LOGITS, torch.full((8,), -100)),
        (OUT * torch.zeros(2, 4)).sum() / torch.zeros(2, 4).sum(),
        torch.tensor(1.0),
    ],
)
def test_of_all_else_nothing_is_told(loss: Tensor) -> None:
    assert told(loss) == {}
    assert told(masked(), loss) == {}


def test_a_graph_that_is_freed_does_no_harm() -> None:
    loss = masked()
    loss.backward()
    assert told(loss) == {}
    assert told(None, [masked(), masked()]) == {}  # type: ignore[arg-type]


def test_a_step_is_told_once() -> None:
    means = Means()
    means.backward_begins([masked()], None)
    assert means.take() == OF_THREE
    assert means.take() == {}
