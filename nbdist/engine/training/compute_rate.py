"""How fast this rank multiplies matrices: the most that a training on it can compute.

All ranks do it at once, for as long: on CPUs they share cores, as they do in a training. Main
thread.
"""

import time
from typing import Any, Final

import torch
import torch.distributed as dist

_CPU_SIZE: Final = 512
_GPU_SIZE: Final = 4096  # 200 MB in float32
_SECONDS: Final = 0.3  # of each dtype
_CPU_AT_ONCE: Final = 1
_GPU_AT_ONCE: Final = 10  # matmuls between two looks at the clock


def measure(names: dict[str, Any]) -> dict[str, float]:
    """Return floating-point operations a second by dtype: float32, and the half that trains here.

    float32 is as the ranks' torch multiplies it (`torch.set_float32_matmul_precision`). The state
    of random generators is left alone.

    Args:
        names: The namespace of the rank's cells.
    """
    device = names["device"]
    return {
        str(dtype).rpartition(".")[2]: _rate(device, dtype)
        for dtype in (torch.float32, _half(device))
    }


def _half(device: torch.device) -> torch.dtype:
    """Return the half precision of the device's tensor cores; CPUs train in bfloat16."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


@torch.no_grad()
def _rate(device: torch.device, dtype: torch.dtype) -> float:
    is_cuda = device.type == "cuda"
    size, at_once = (_GPU_SIZE, _GPU_AT_ONCE) if is_cuda else (_CPU_SIZE, _CPU_AT_ONCE)
    own = torch.Generator(device).manual_seed(0)
    # Numbers as models have them: a GPU multiplies zeros with less power, and so faster.
    a, b = torch.randn(2, size, size, generator=own, device=device).to(dtype)
    out = torch.empty_like(a)
    _multiply(a, b, out, 2)  # the first one chooses a kernel
    if dist.is_initialized():
        dist.barrier()
    count, began = 0, time.perf_counter()
    while (took_s := time.perf_counter() - began) < _SECONDS:
        _multiply(a, b, out, at_once)
        count += at_once
    return 2.0 * size**3 * count / took_s


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(a, b, out=out)
    if out.is_cuda:
        torch.cuda.synchronize(out.device)
