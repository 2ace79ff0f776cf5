"""Run a script under torchrun, on CPU ranks of this machine."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 200  # tells a hang from a slow machine


def torchrun(
    script: Path, n: int, *arguments: str, max_restarts: int = 0, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Return how it ended: `returncode`, `stdout`, `stderr` of all `n` ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--max-restarts={max_restarts}"]
    return subprocess.run(
        [*command, f"--nproc-per-node={n}", str(script), *arguments],
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
