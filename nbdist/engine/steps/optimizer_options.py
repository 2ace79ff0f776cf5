"""Read and set what an optimizer's groups hold beside parameters: learning rates and the like."""

import copy
from typing import Any

import torch

Options = list[dict[str, Any]]  # of each group


def options_of(optimizer: torch.optim.Optimizer) -> Options:
    """Return what an optimizer's groups hold beside parameters, copied."""
    return [
        {name: copy.deepcopy(v) for name, v in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def put_options(optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Give an optimizer what `options_of` returned."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name, value in values.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)  # a compiled step holds it
            else:
                group[name] = copy.deepcopy(value)
