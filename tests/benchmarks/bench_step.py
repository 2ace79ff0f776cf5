"""A training step with everything measured and shown, against the same loop under `torchrun`."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks import step_loop
from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, render

# Width of the model to (name, share of processor time that may be added).
CASES = {64: ("1 ms step", 0.10), 1024: ("10 ms step", 0.02)}
WIDEST = max(CASES)
WALL_GOAL = 1.02


def _torchrun(script: Path, width: int, steps: int) -> tuple[float, float]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        *(str(script), str(width), str(steps)),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    cpu_ms, wall_ms = json.loads(ran.stdout.strip().splitlines()[-1])
    return cpu_ms, wall_ms


def _in_a_cell(kernel: Kernel, width: int, steps: int) -> tuple[float, float]:
    cell = f"%%distributed\n{step_loop.STEP}\nmeasured = measure({width}, {steps})"
    printed, error, _ = kernel.run(cell)
    if error:
        raise RuntimeError(f"{error}: {printed}")
    kernel.run("%dist pull measured")
    cpu_ms, wall_ms = kernel.ask("import json; print(json.dumps(measured[0]))")
    return cpu_ms, wall_ms


def rows(rounds: int = 3) -> list[Row]:
    """Return, for each length of step, the share of processor time added to a rank."""
    made = []
    with tempfile.TemporaryDirectory() as folder, Kernel() as kernel:
        script = Path(folder) / "loop.py"
        script.write_text(step_loop.MAIN)
        kernel.run("%load_ext nbdist\n%dist start -n 2 --device cpu --threads 1")
        for width, (name, goal) in CASES.items():
            steps = 600 if width < 512 else 150
            bare, ours = [], []
            for _ in range(rounds):
                bare.append(_torchrun(script, width, steps))
                ours.append(_in_a_cell(kernel, width, steps))
            (bare_cpu, bare_wall), (our_cpu, our_wall) = (
                [statistics.median(part) for part in zip(*times, strict=True)]
                for times in (bare, ours)
            )
            note = (
                f"{our_cpu:.2f} against {bare_cpu:.2f} ms of processor, "
                f"{our_wall:.2f} against {bare_wall:.2f} ms of wall time"
            )
            made.append(Row(f"added to a {name}", our_cpu / bare_cpu - 1, goal, "of it", note))
            if width == WIDEST:
                # With as many ranks as cores no core is free, which the goal supposes.
                made.append(Row(f"wall time of a {name}", our_wall / bare_wall, WALL_GOAL, "x"))
    return made


if __name__ == "__main__":
    print(render(rows()))
