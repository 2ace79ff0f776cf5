"""Stand-ins for weights: numbers to prove a plan with, that take no memory and go again."""

import torch
from torch import nn

from nbdist.engine.layout.weights import meta_copy, stand_in


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(600, 400), nn.Linear(400, 600, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(400), requires_grad=False)


def test_stand_ins_take_no_memory_and_no_two_features_are_alike() -> None:
    model = Tied()
    meta_copy.take_weights(model)
    with stand_in.lent(model, "cpu"):
        weight = model.head.weight
        assert weight.shape == (600, 400)
        assert weight.untyped_storage().nbytes() < 4 * (2 * 600 + 400)
        assert len({tuple(row.tolist()) for row in weight}) == 600
        assert len({tuple(column.tolist()) for column in weight.t()}) == 400
        x = torch.randn(3, 400)
        torch.testing.assert_close(model.head(x), x @ weight.detach().contiguous().t())


def test_the_model_is_afterwards_as_it_was() -> None:
    model = Tied()
    meta_copy.take_weights(model)
    before = dict(model.named_parameters(remove_duplicate=False))
    with stand_in.lent(model, "cpu"):
        assert model.head.weight is model.table.weight
        assert model.head.weight.requires_grad
        assert not model.scale.requires_grad
        assert not any(p.is_meta for p in model.parameters())
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is p for name, p in before.items())
    assert not any(module._forward_hooks for module in model.modules())


def test_every_rank_makes_the_same_numbers_and_chance_goes_on_as_if_none_were_made() -> None:
    model = Tied()
    meta_copy.take_weights(model)
    torch.manual_seed(1)
    with stand_in.lent(model, "cpu"):
        first = model.head.weight.detach().clone()
    drawn = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(2), drawn)
    with stand_in.lent(model, "cpu"):
        assert torch.equal(model.head.weight, first)
