"""A block that computes again does not write its keys and values into a cache twice."""

from typing import Any

import torch
from torch import Tensor, nn

from nbdist.engine.layout.policies import activation_checkpoint
from nbdist.engine.layout.policies.efficiency import ActivationCheckpoint


class Cached(nn.Module):
    """As GPT-2's block: the cache is its second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, past_key_values: Any = None, mask: Tensor | None = None, **given: Any
    ) -> Tensor:
        made = self.inner(x)
        if past_key_values is not None:
            past_key_values.append(made.detach())
            made = torch.cat([*past_key_values[:-1], made]).sum(0, keepdim=True) + x
        return made if mask is None else made * mask


def gradient(model: nn.Module, *args: Any, **keywords: Any) -> Tensor:
    model.zero_grad()
    model(*args, **keywords).sum().backward()
    found = model.get_parameter("inner.weight").grad
    assert found is not None
    return found.clone()


def test_wherever_the_cache_stands_among_its_arguments() -> None:
    torch.manual_seed(0)
    block, x, mask = Cached(), torch.randn(2, 4), torch.ones(2, 4)
    expected = gradient(block, x, None, mask)
    activation_checkpoint.apply(ActivationCheckpoint(), {"block": block}, can_compile=True)
    for args, keywords in (((x, [], mask), {}), ((x,), {"past_key_values": [], "mask": mask})):
        assert torch.equal(gradient(block, *args, **keywords), expected)


def test_other_arguments_arrive_as_they_are() -> None:
    seen: list[Any] = []

    class Seeing(Cached):
        def forward(self, x: Tensor, past_key_values: Any = None, *rest: Any, **given: Any) -> Any:
            seen.append((past_key_values, rest, given))
            return self.inner(x)

    block = Seeing()
    activation_checkpoint.apply(ActivationCheckpoint(), {"block": block}, can_compile=True)
    block(torch.ones(1, 4), ["cache"], (1, 2), None, scale=2.0, use_cache=True)
    assert seen == [(None, ((1, 2), None), {"scale": 2.0, "use_cache": False})]
