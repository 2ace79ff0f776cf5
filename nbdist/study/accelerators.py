"""What accelerators compute and hold, by their data sheets: dense figures, none with sparsity.

Memory of T4, A10, L4, L40S, A100 and H100 as github.com/modal-labs/modal-client/pull/2797 lists it,
of H200 as github.com/stas00/ml-engineering; of V100, MI300X, RTX 4090 and 5090 it was not checked.
Of data sheets, those of T4, A100, H100, H200, B200, L40S and MI300X were compared with a second
source.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_MIB: Final = 2**20
ASSUMED_SHARE: Final = 0.75
# Of the peak that a step of a whole model reaches. Sources: torchtitan's benchmarks of 2024 (33 to
# 39 % on H100), Narayanan 2021, table 1 (44 to 52 % on A100).
STEP_SHARE: Final = 0.4


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device, as one rank uses it.

    Attributes:
        name: As people write it.
        flops: The most floating-point operations a second, by torch's names of dtypes; "tf32" is
            float32 where matmuls may round. bfloat16 is missing where no tensor core has it.
        memory_bytes: As nvidia-smi or amd-smi list it: a little less than the data sheet's.
        memory_bandwidth: Bytes a second.
        link: The word of `LINKS` for what usually joins several of them in a host.
        source: Where the figures come from.
        share: What large bfloat16 matmuls reach of `flops`: 0.75 is assumed where nobody measured.
        step_share: What a step of a whole model reaches of them.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    link: str
    source: str
    share: float = ASSUMED_SHARE
    step_share: float = STEP_SHARE

    @property
    def is_assumed(self) -> bool:
        """Whether nobody is known to have measured the share."""
        return self.share == ASSUMED_SHARE


def _flops(
    float32: float, tf32: float, half: float, *, has_bfloat16: bool = True
) -> dict[str, float]:
    """Return operations a second from TFLOP/s."""
    found = {"float32": float32, "tf32": tf32, "float16": half}
    if has_bfloat16:
        found["bfloat16"] = half
    return {dtype: rate * 1e12 for dtype, rate in found.items()}


_MATMUL = "; matmuls by github.com/stas00/ml-engineering, compute/accelerator (MAMF)"

# The half-precision figures of GeForce are those with accumulation in float32, as torch's matmuls.
ACCELERATORS: Final[Mapping[str, Accelerator]] = {
    "t4": Accelerator(
        *("NVIDIA T4", _flops(8.1, 8.1, 65, has_bfloat16=False), 15360 * _MIB, 320e9, "pcie3"),
        "NVIDIA T4 data sheet",
    ),
    "v100": Accelerator(
        "NVIDIA V100 SXM2 32 GB",
        _flops(15.7, 15.7, 125, has_bfloat16=False),
        *(32768 * _MIB, 900e9, "nvlink2"),
        "NVIDIA V100 data sheet",
    ),
    "a10": Accelerator(
        *("NVIDIA A10", _flops(31.2, 62.5, 125), 23028 * _MIB, 600e9, "pcie4"),
        "NVIDIA A10 data sheet",
    ),
    "l4": Accelerator(
        *("NVIDIA L4", _flops(30.3, 60, 121), 23034 * _MIB, 300e9, "pcie4"),
        "NVIDIA L4 data sheet, halved where it counts sparsity",
    ),
    "l40s": Accelerator(
        *("NVIDIA L40S", _flops(91.6, 183, 362), 46068 * _MIB, 864e9, "pcie4"),
        "NVIDIA L40S data sheet",
    ),
    "a100-40": Accelerator(
        *("NVIDIA A100 SXM 40 GB", _flops(19.5, 156, 312), 40960 * _MIB, 1555e9, "nvlink3"),
        *(f"NVIDIA A100 data sheet{_MATMUL}", 0.87),
    ),
    "a100-80": Accelerator(
        *("NVIDIA A100 SXM 80 GB", _flops(19.5, 156, 312), 81920 * _MIB, 2039e9, "nvlink3"),
        *(f"NVIDIA A100 data sheet{_MATMUL}", 0.87),
    ),
    "h100": Accelerator(
        *("NVIDIA H100 SXM", _flops(67, 494.5, 989), 81559 * _MIB, 3.35e12, "nvlink4"),
        *(f"NVIDIA H100 data sheet, halved where it counts sparsity{_MATMUL}", 0.80),
    ),
    "h200": Accelerator(
        *("NVIDIA H200 SXM", _flops(67, 494.5, 989), 143155 * _MIB, 4.8e12, "nvlink4"),
        *(f"NVIDIA H200 data sheet, halved where it counts sparsity{_MATMUL} of GH200", 0.84),
    ),
    "b200": Accelerator(
        *("NVIDIA B200 SXM", _flops(80, 1125, 2250), 182630 * _MIB, 8e12, "nvlink5"),
        "NVIDIA DGX B200 data sheet, an eighth of it, halved where it counts sparsity; memory by "
        "its driver, github.com/pytorch/ao/pull/4002",
    ),
    "mi300x": Accelerator(
        *("AMD MI300X", _flops(163.4, 653.7, 1307.4), 196592 * _MIB, 5.3e12, "xgmi"),
        *(f"AMD MI300X data sheet{_MATMUL}", 0.51),
    ),
    "rtx3090": Accelerator(
        *("NVIDIA RTX 3090", _flops(35.6, 35.6, 71), 24576 * _MIB, 936e9, "pcie4"),
        "NVIDIA Ampere GA102 white paper",
    ),
    "rtx4090": Accelerator(
        *("NVIDIA RTX 4090", _flops(82.6, 82.6, 165.2), 24564 * _MIB, 1008e9, "pcie4"),
        "NVIDIA Ada white paper",
    ),
    "rtx5090": Accelerator(
        *("NVIDIA RTX 5090", _flops(104.8, 104.8, 209.5), 32607 * _MIB, 1792e9, "pcie5"),
        "NVIDIA RTX Blackwell white paper",
    ),
}
