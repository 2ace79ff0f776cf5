"""Layers that project features: torch's Linear, and transformers' Conv1D, which lies (in, out).

By the class's name, for transformers may be absent.
"""

from typing import Any

from torch import nn


def dims_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the dims of outputs and of inputs in a projection's weight; None of other modules.

    So None where the weight is computed, as a parametrization does.
    """
    if module._parameters.get("weight") is None:
        return None
    if isinstance(module, nn.Linear):
        return 0, 1
    is_transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return (1, 0) if is_transposed else None


def widths_of(module: nn.Module) -> tuple[int, int] | None:
    """Return how many features a projection takes, and makes; None of other modules."""
    dims = dims_of(module)
    if dims is None:
        return None
    weight: Any = module.weight
    outputs, inputs = dims
    return weight.shape[inputs], weight.shape[outputs]


def packed_sizes(layer: nn.Module, row: nn.Module) -> tuple[int, ...]:
    """Return the sizes of the projections that a layer packs; empty where its row shows none.

    They are as wide as what the row takes, or but the first is, and two more are narrower: an
    attention with fewer heads for keys and values.
    """
    made, taken = widths_of(layer), widths_of(row)
    if made is None or taken is None or made[1] <= taken[0]:
        return ()
    count, left = divmod(made[1], taken[0])
    if not left:
        return (taken[0],) * count
    narrow, odd = divmod(made[1] - taken[0], 2)
    return () if odd or narrow > taken[0] else (taken[0], narrow, narrow)
