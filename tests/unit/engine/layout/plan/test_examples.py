"""What an example of a batch means to a model."""

from typing import Any

import torch
from torch import nn

from nbdist.engine.layout.plan.examples import of_example

x, y = torch.ones(2, 3), torch.zeros(2)


class One(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Two(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return x, mask


class Any_(nn.Module):
    def forward(self, *args: Any, **keywords: Any) -> Any:
        return args, keywords


def test_targets_behind_what_a_model_takes_are_left_out() -> None:
    assert of_example(One(), (x, y)).args == (x,)
    assert of_example(One(), [x, y]).args == (x,)
    assert of_example(One(), ({"a": x}, y)).keywords == {"a": x}
    assert of_example(One(), {"x": x, "labels": y}).keywords == {"x": x}


def test_what_a_model_takes_is_taken_as_it_is() -> None:
    assert of_example(Two(), (x, y)).args == (x, y)
    assert of_example(One(), ((x, y),)).args == ((x, y),)
    assert of_example(One(), x).args == (x,)
    assert of_example(Any_(), (x, y, x)).args == (x, y, x)
    assert of_example(Any_(), {"x": x, "labels": y}).keywords == {"x": x, "labels": y}
