"""What watching adds to a training step, against the same loop under `torchrun`.

Two bare runs and one in a cell stand ready all the time and train in turns: bare, ours, the other
bare one. The two bare ones differ by the noise. Counted is processor time of a rank with all its
threads, and that of the processes that nbdist has beside the ranks, within the same steps.
"""

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from tests.benchmarks import step_loop
from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, apart, render

LONGEST_S = 300.0
_HAS_SENT = """
import json
import nbdist.client.notebook.current as current
from nbdist.client.tracking.shipper import wait_until_sent
print(json.dumps(wait_until_sent(current._tracker().folder, 120)))
"""
BESIDE = ("notebook", "controller", "shipping process")


@dataclass(frozen=True, slots=True)
class Case:
    """A length of step, and what may be added to it as shares of the bare loop's time.

    The first `settle` steps are not counted: MLflow's run and the board begin meanwhile.
    """

    name: str
    width: int
    settle: int
    steps: int
    goal: float
    wall_goal: float | None = None


CASES = (
    Case("1 ms step", 64, 1500, 4000, 0.05),
    # With as many ranks as cores no core is free, which the goal of wall time supposes.
    Case("10 ms step", 1024, 200, 800, 0.01, wall_goal=0.02),
)


class _Bare:
    """The loop under torchrun on two ranks, which measures when asked."""

    def __init__(self, script: Path) -> None:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script)),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def measure(self, width: int, settle: int, steps: int) -> list[float]:
        """Return (processor, wall) in us a step, mean of the ranks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([width, settle, steps]), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], LONGEST_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError("The loop under torchrun ended, or did not answer in time.")
        return _mean(json.loads(line))

    def __enter__(self) -> "_Bare":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the loop ends at the end of its input
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(30)


class _Ours:
    """The loop in cells of a notebook, on as many ranks."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        kernel.run("%load_ext nbdist\n%dist start -n 2 --device cpu --threads 1")
        self._cell(CASES[0].width, 0, 50, [])  # the shipping process begins
        kernel.ask(
            _HAS_SENT
        )  # it has imported mlflow, which is no step's cost, and made its tables
        self._others = _pids_beside(kernel)
        self.shipping_began_s = sum(
            sum(psutil.Process(pid).cpu_times()[:2]) for pid in self._others[-1]
        )

    def measure(self, width: int, settle: int, steps: int) -> list[float]:
        """Return (processor, wall, the processes of BESIDE) in us a step, mean of the ranks."""
        return self._cell(width, settle, steps, self._others)

    def _cell(self, width: int, settle: int, steps: int, others: list[list[int]]) -> list[float]:
        call = f"measured = measure({width}, {settle}, {steps}, {others})"
        printed, error, _ = self._kernel.run(f"%%distributed\n{step_loop.STEP}\n{call}", LONGEST_S)
        if error:
            raise RuntimeError(f"{error}: {printed}")
        self._kernel.run("%dist pull measured")
        return _mean(self._kernel.ask("import json; print(json.dumps(measured))"))


def _pids_beside(kernel: Kernel) -> list[list[int]]:
    """Return the pids of each of BESIDE, with the processes that they have themselves."""
    notebook = kernel.ask("import os; print(os.getpid())")
    controller = kernel.ask(
        "import nbdist.client.notebook.current as current\n"
        "print(current._launcher._link.pids['controller'])"
    )
    ship = [
        child.pid
        for child in psutil.Process(notebook).children(recursive=True)
        if "nbdist.client.tracking.ship" in child.cmdline()
    ]
    family = [controller, *(p.pid for p in psutil.Process(controller).children(recursive=True))]
    return [[notebook], family, ship]


def _mean(per_rank: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.mean(part) for part in zip(*per_rank, strict=True)]


def rows(rounds: int = 5, shorter: int = 1) -> list[Row]:
    """Return what is added to each length of step.

    `shorter` divides the numbers of steps, where each takes longer: what settles does so in time.
    """
    made = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "loop.py"
        script.write_text(step_loop.SERVE)
        with Kernel() as kernel, _Bare(script) as one, _Bare(script) as other:
            ours = _Ours(kernel)
            for case in CASES:
                settle, steps = case.settle // shorter, case.steps // shorter
                turns = []
                for _ in range(rounds):
                    before = one.measure(case.width, 50, steps)
                    inside = ours.measure(case.width, settle, steps)
                    turns.append((before, inside, other.measure(case.width, 50, steps)))
                made += _compared(case, turns)
            once_s = ours.shipping_began_s
    once = "the shipping process, once: imports mlflow, makes a database"
    return [*made, Row(once, once_s, "s")]


def _compared(
    case: Case, turns: Sequence[tuple[list[float], list[float], list[float]]]
) -> list[Row]:
    """Return a row for each part of the processor time, for all of it, and for wall time."""
    ones, _, others = zip(*turns, strict=True)
    beside = f"bare {case.name}, torchrun"
    bare = [statistics.median([run[i] for run in ones + others]) for i in (0, 1)]
    noise = [apart([run[i] for run in ones], [run[i] for run in others]) for i in (0, 1)]
    added = [[ours[i] - (one[i] + other[i]) / 2 for one, ours, other in turns] for i in (0, 1)]
    parts = [added[0], *([ours[2 + i] for _, ours, _ in turns] for i in range(len(BESIDE)))]
    together = [sum(turn) for turn in zip(*parts, strict=True)]

    def row(what: str, values: Sequence[float], clock: int, goal: float | None = None) -> Row:
        name, measured = f"added to a {case.name}: {what}", statistics.median(values)
        return Row(name, measured, "us", bare[clock], beside, noise[clock], goal, is_share=True)

    return [
        row("processor time of a rank", parts[0], 0, case.goal),
        *(row(f"of the {name}", part, 0) for name, part in zip(BESIDE, parts[1:], strict=True)),
        row("of all of these", together, 0, case.goal),
        row("wall time", added[1], 1, case.wall_goal),
    ]


if __name__ == "__main__":
    print(render([[row] for row in rows()]))
