"""Measure a notebook's own steps on several numbers of ranks, in processes beside the session.

The cells run as an exported script: those that set things up, and the one that trains. They are
not changed: what they write to files in these steps they write again.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nbdist.client.export.export import Exported
from nbdist.client.export.launch import LaunchFailed, launch, read_records
from nbdist.client.export.script import ScriptOptions
from nbdist.client.metrics.analysis.values import LEFT_OUT
from nbdist.client.metrics.world import world_of_records
from nbdist.shared.collectives import rounds
from nbdist.shared.errors import NBDistError
from nbdist.shared.options import BATCH_TIMES, LATENCY, STEPS, VIRTUAL
from nbdist.shared.text import counted
from nbdist.study.scaling import World

TIMEOUT_S = 600.0


class ScalingError(NBDistError):
    """A cell whose steps cannot be measured on other numbers of ranks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Worlds by their number of ranks, and why others are missing, in sentences."""

    worlds: tuple[World, ...]
    failed: tuple[str, ...]


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Give the path of a script; it is removed afterwards, and so are checkpoints of its name."""
    with tempfile.TemporaryDirectory(prefix="nbdist-scaling-") as place:
        path = Path(place, f"{Path(place).name}.py")
        try:
            yield path
        finally:
            shutil.rmtree(folder / ".nbdist" / "checkpoints" / path.stem, ignore_errors=True)


def measure(
    made: Exported,
    numbers: Sequence[int],
    *,
    folder: Path,
    steps: int,
    tell: Callable[[str], None],
    weak_from: int = 0,
) -> Measured:
    """Run a script on each number of ranks, the largest first; what the others fail at is told.

    Args:
        made: The script.
        numbers: Of ranks, the smallest first.
        folder: Where it runs: the notebook's.
        steps: How many each makes; the first `LEFT_OUT` are left out.
        tell: Gets a line before each.
        weak_from: Batches of `nbdist.loader` grow with the ranks from this number on; 0: never.

    Raises:
        ScalingError: The largest number failed: with it the others will, or mean nothing.
    """
    worlds: list[World] = []
    failed: list[str] = []
    for n in sorted(numbers, reverse=True):
        grown = ", the batch grown with them" if weak_from else ""
        tell(f"Measuring {counted(steps, 'step')} on {counted(n, 'rank')}{grown} ...")
        options = replace(made.script.options, n=n, nodes=1)
        times = n // weak_from if weak_from else 1
        try:
            worlds.insert(0, _world(made.files[0], options, folder, steps, times))
        except LaunchFailed as error:
            if not worlds:
                raise ScalingError(
                    f"The cell's steps cannot be measured on {counted(n, 'rank')}.",
                    why=str(error),
                    do="%dist export SCRIPT --check shows what a script of its cells is without",
                ) from None
            failed.append(f"{counted(n, 'rank')}: not measured. {last_line(str(error))}")
    return Measured(tuple(worlds), tuple(failed))


def last_line(traceback: str) -> str:
    """Return the line of a traceback that names the error; why and what to do are behind it."""
    lines = [line for line in traceback.splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith((" ", "Why: ", "Do:  ", "Traceback"))]
    return (named or lines or [""])[-1]


def _world(script: Path, options: ScriptOptions, folder: Path, steps: int, times: int) -> World:
    with tempfile.TemporaryDirectory(prefix="nbdist-records-") as records:
        latency = Path(records, "latency.json")
        environ = {STEPS: str(steps), LATENCY: str(latency), BATCH_TIMES: str(times)}
        environ[VIRTUAL] = options.virtual
        before = os.environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
        try:
            launch(
                script, options, Path(records), timeout_s=TIMEOUT_S, folder=folder, environ=environ
            )
        except subprocess.TimeoutExpired:
            raise LaunchFailed(f"it made no {steps} steps in {TIMEOUT_S:.0f} s") from None
        is_cuda = options.device == "cuda"
        backend = "nccl" if is_cuda and options.backend != "gloo" else "gloo"
        whole_s = json.loads(latency.read_text(encoding="utf-8")) if latency.exists() else 0.0
        world = world_of_records(
            read_records(Path(records), options.n),
            cores=0 if is_cuda else max(1, cores() // (options.threads or 1)),
            backend=backend,
            latency_s=whole_s / max(1, rounds("all_reduce", options.n, backend)),
        )
    if world is None:
        raise LaunchFailed(f"fewer than {LEFT_OUT + 1} steps of an optimizer were made")
    return world


def cores() -> int:
    """Return the cores that this process, and what it starts, may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
