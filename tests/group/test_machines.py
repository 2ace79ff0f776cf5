"""What is said of layouts holds on other CPUs: this one acts as such, by its libraries' settings.

Products, sums and vector functions are then added in other orders. Another vendor's CPU, and ARM,
are not tried so.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GROUP = Path(__file__).parent
SAYING = ("parity", "noise", "verify", "layouts", "tensor_parallel", "context", "pipeline")
MACHINES = {
    "ATen without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE 4.1 in oneDNN": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "MKL as on any CPU": {"MKL_CBWR": "COMPATIBLE"},
    "the least of all": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    },
    "one thread": {"OMP_NUM_THREADS": "1"},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("machine", MACHINES)
def test_layouts_compute_what_one_process_computes_on(machine: str) -> None:
    files = [str(GROUP / f"test_{name}.py") for name in SAYING]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    ran = subprocess.run(
        words,
        env={**os.environ, **MACHINES[machine]},
        cwd=GROUP.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-10000:]


def test_the_settings_are_heeded() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"],
        env={**os.environ, **MACHINES["ATen without vectors"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() in ("DEFAULT", "NO AVX")
