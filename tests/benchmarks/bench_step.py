"""What watching adds to a training step, against the same loop under `torchrun`.

Two bare runs and one in a cell stand ready all the time and train in turns: bare, ours, the other
bare one. The two bare ones differ by the noise.

On the CPU processor time is counted, of a rank with all its threads, and that of the processes that
nbdist has beside the ranks, within the same steps. On GPUs it is the time that the host takes to
queue a step, beside what the step's collectives cost, and the wall time of steps in a row.
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

from nbdist.host.warm import find_gpus
from nbdist.shared.text import counted
from tests.benchmarks import step_loop
from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, apart, render

LONGEST_S = 300.0
_HAS_SENT = """
import json
import nbdist.client.notebook.current as current
from nbdist.client.tracking.shipping.shipper import wait_until_sent
print(json.dumps(wait_until_sent(current._tracker().folder, 120)))
"""
BESIDE = ("notebook", "controller", "shipping process")


@dataclass(frozen=True, slots=True)
class Case:
    """A length of step on the CPU, and what may be added as a share of the bare loop's time.

    The first `settle` steps are not counted: MLflow's run and the board begin meanwhile.
    """

    name: str
    width: int
    settle: int
    steps: int
    goal: float


CASES = (
    Case("5 ms step", 768, 400, 1200, 0.05),
    Case("50 ms step", 2560, 40, 200, 0.01),
)


@dataclass(frozen=True, slots=True)
class GpuCase:
    """A model on a GPU: its layers, width, tokens and batch, as `step_loop.CUDA_STEP` builds it.

    Only a step that is `gpu_bound` hides what the host does meanwhile.
    """

    name: str
    shape: tuple[int, int, int, int]
    settle: int
    steps: int
    gpu_bound: bool = False


GPU_CASES = (
    GpuCase("an MLP", (0, 256, 1, 64), 400, 800),
    GpuCase("a GPT of 4 layers", (4, 256, 128, 8), 100, 200),
    GpuCase("a GPT of 12 layers", (12, 1024, 512, 16), 20, 60, gpu_bound=True),
)
HOST_GOAL_US = 100.0
COLLECTIVE_GOAL_US = 45.0  # at "full", the default


class _Bare:
    """The loop under torchrun, which measures when asked."""

    def __init__(self, script: Path, ranks: int = 2, backend: str = "gloo") -> None:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script), backend),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def measure(self, *arguments: object) -> list[float]:
        """Return what the loop's `measure` returns, mean of the ranks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
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
        return _in_cell(self._kernel, step_loop.STEP, width, settle, steps, others)


def _in_cell(kernel: Kernel, loop: str, *arguments: object) -> list[float]:
    """Return what a loop's `measure` returns in a cell, mean of the ranks."""
    call = f"measured = measure(*{arguments!r})"
    printed, error, _ = kernel.run(f"%%distributed\n{loop}\n{call}", LONGEST_S)
    if error:
        raise RuntimeError(f"{error}: {printed}")
    kernel.run("%dist pull measured")
    return _mean(kernel.ask("import json; print(json.dumps(measured))"))


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
        if "nbdist.client.tracking.shipping.ship" in child.cmdline()
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
        row("wall time", added[1], 1),
    ]


def gpu_rows(rounds: int = 5, cases: Sequence[GpuCase] = GPU_CASES) -> list[Row]:
    """Return what is added to steps on GPUs: a rank for each GPU of this machine, over nccl."""
    ranks = find_gpus(fork=False)[0]
    made = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "loop.py"
        script.write_text(step_loop.CUDA_SERVE)
        bare = (script, ranks, "cpu:gloo,cuda:nccl")
        with Kernel() as kernel, _Bare(*bare) as one, _Bare(*bare) as other:
            kernel.run(f"%load_ext nbdist\n%dist start -n {ranks} --device cuda --threads 1")
            for case in cases:
                turns = []
                for _ in range(rounds):
                    asked = (case.shape, case.settle, case.steps)
                    before = one.measure(*asked)
                    inside = _in_cell(kernel, step_loop.CUDA_STEP, *asked)
                    turns.append((before, inside, other.measure(*asked)))
                made += gpu_compared(case, ranks, turns)
    return made


def gpu_compared(
    case: GpuCase, ranks: int, turns: Sequence[tuple[list[float], list[float], list[float]]]
) -> list[Row]:
    """Return the rows of one model, of its turns: what `measure` returned bare, watched and bare.

    What a collective costs has a row of its own: a step is charged without its collectives.
    """
    wall, host, each, collectives = range(4)
    ones, inside, others = zip(*turns, strict=True)
    bare = [statistics.median([run[i] for run in ones + others]) for i in range(4)]
    noise = [apart([run[i] for run in ones], [run[i] for run in others]) for i in range(3)]
    added = [[ours[i] - (one[i] + other[i]) / 2 for one, ours, other in turns] for i in range(3)]
    beside = [h - bare[collectives] * e for h, e in zip(added[host], added[each], strict=True)]
    name, count = f"step of {case.name} on a GPU", counted(round(bare[collectives]), "collective")
    where = f"bare, torchrun, {counted(ranks, 'rank')}"

    def added_row(what: str, values: Sequence[float], clock: int, goal_us: float) -> Row:
        measured = statistics.median(values)
        return Row(
            *(f"added to a {name}: {what}", measured, "us", bare[clock], where, noise[clock]),
            goal=goal_us,
            goal_on="measured",
            is_share=True,
        )

    def wall_row(what: str, runs: Sequence[list[float]], goal: float | None = None) -> Row:
        measured = statistics.median([run[wall] for run in runs])
        return Row(f"{name}: {what}", measured, "us", bare[wall], where, noise[wall], goal)

    within_noise = round(1 + noise[wall], 3) if case.gpu_bound else None
    return [
        added_row(f"host time beside {count}", beside, host, HOST_GOAL_US),
        added_row("host time of a collective", added[each], each, COLLECTIVE_GOAL_US),
        wall_row("wall time", inside, within_noise),
        wall_row("wall time, the other bare run", others),
    ]


if __name__ == "__main__":
    print(render([[row] for row in rows()]))
