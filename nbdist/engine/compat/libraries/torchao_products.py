"""Products of a linear layer with operands of eight bits, as torchao computes them.

torchao is optional, and imported where a layout asks for it. What is used of it is not public: its
public functions put modules of its own in the place of a model's. `check()` says what a new release
has moved. Tried with torchao 0.18, on a CPU, where the eight bits are emulated.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_BLOCK = 32  # numbers with one scale, in mxfp8


def check() -> list[str]:
    """Return what torchao, where it is imported, lacks of what we use; else nothing."""
    if "torchao" not in sys.modules:
        return []
    return [f"no product in {kind}: {why}" for kind in _MADE if (why := why_not(kind))]


def why_not(kind: str) -> str:
    """Return why products of this kind cannot be made here; "" where they can. Imports torchao."""
    if find_spec("torchao") is None:
        return "it computes by torchao, which is not installed"
    try:
        product(kind, emulates=True)
    except (ImportError, AttributeError, TypeError) as error:
        return f"the installed torchao has another way to make them: {error}"
    return ""


@cache
def product(kind: str, *, emulates: bool) -> Product:
    """Return what multiplies inputs `(..., K)` with a weight `(N, K)`, both bfloat16.

    Args:
        kind: "fp8", with a scale for each tensor, or "mxfp8", with one for 32 numbers.
        emulates: Rounds to eight bits and multiplies in bfloat16: the numbers, and no speed.
    """
    return _MADE[kind](emulates)


def _fp8(emulates: bool) -> Product:
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    # Of any number of samples: the product that makes a weight's gradient goes over them.
    config = Float8LinearConfig(emulate=emulates, pad_inner_dim=not emulates)
    with torch.device("meta"):
        how: Any = Float8Linear(16, 16, bias=False, config=config).linear_mm_config

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), how, config)
        return out

    return multiply


def _mxfp8(emulates: bool) -> Product:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    e4m3 = torch.float8_e4m3fn
    by = KernelPreference.EMULATED if emulates else KernelPreference.AUTO
    rows = config.MXFP8Dim0CastKernelChoice.TRITON
    columns = config.MXFP8Dim1CastKernelChoice
    cast = columns.TORCH if emulates else columns.CUDA
    scale = config.ScaleCalculationMode.RCEIL

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # A weight's gradient stays in bfloat16: its product goes over samples, of any number.
        out: torch.Tensor = mx_mm.apply(
            x, weight, e4m3, e4m3, e4m3, _BLOCK, by, rows, cast, scale, True
        )
        return out

    return multiply


_MADE = {"fp8": _fp8, "mxfp8": _mxfp8}
