"""Prove an exported script: run one step of it under torchrun, and compare the loss.

What guesses about a notebook could say at best, this shows: that the script runs alone, and begins
as the notebook did.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from nbdist.client.export.parts import trains
from nbdist.client.export.script import Script
from nbdist.shared.errors import NBDistError
from nbdist.shared.options import HASH_SEED
from nbdist.shared.text import name_ranks

TIMEOUT_S = 600.0
_MOST_LINES = 6  # of what a script that fails has said
_OF_RANK = re.compile(r"\[rank\d+\]: ")
_RUNNER = "nbdist.engine.rank.first_step"
_RUNNER_FILE = "rank/first_step.py"


class ExportError(NBDistError):
    """A script that does not begin as the notebook did."""


def check(path: Path, script: Script, expected: Mapping[int, float]) -> str:
    """Run a script until its first step, and return in a sentence how its loss compares.

    Args:
        path: Where it was written.
        script: What was.
        expected: Losses of the notebook's first step, by rank; empty where they are not known.

    Raises:
        ExportError: It fails, makes no step in `TIMEOUT_S`, or its loss is another one.
    """
    if script.options.nodes > 1:
        raise ExportError(
            f"{path} is not checked: it is for {script.options.nodes} machines.",
            do="export it with --nodes 1 to check it on this one",
        )
    steps = _first_steps(path, script)
    if not steps and not expected and not trains(script.text):
        return "Checked: it ran to its end under torchrun; no optimizer steps in it."
    if not steps:
        raise ExportError(
            f"{path} was written, and ends under torchrun without a step of an optimizer.",
            do="export the cell that trains, too",
        )
    found = {rank: step["loss"] for rank, step in steps.items() if "loss" in step}
    if not expected:
        return f"Checked: one step ran, with {_named(found)}; the notebook's loss is not known."
    other = {rank: loss for rank, loss in expected.items() if found.get(rank) != loss}
    if other:
        raise ExportError(
            f"{path} begins with {_named(found)}, and the notebook with {_named(expected)}.",
            why=f"{name_ranks(sorted(other))} of the first step differ: a cell that trains ran"
            " again, or cells ran in another order, on random numbers that are not seeded, or on"
            " values that cells left out have changed",
            do="restart the kernel, run all cells in order with torch.manual_seed, export again",
        )
    return f"Checked: its first step under torchrun has {_named(found)}, as in the notebook."


def _named(losses: Mapping[int, float]) -> str:
    if not losses:
        return "no loss"
    values = sorted(set(losses.values()))
    if len(values) == 1:
        return f"loss {values[0]:.6g}"
    by_rank = (f"{loss:.6g} on rank {rank}" for rank, loss in sorted(losses.items()))
    return f"loss {', '.join(by_rank)}"


def _first_steps(path: Path, script: Script) -> dict[int, Mapping[str, float]]:
    """Return what ranks recorded of the script's first step; those that made none are left out."""
    options = script.options
    words = {
        "device": options.device,
        "backend": options.backend or None,
        "threads": options.threads,
        **({} if options.timeout is None else {"timeout": options.timeout}),
    }
    with tempfile.TemporaryDirectory(prefix="nbdist-check-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={options.n}", "-m", _RUNNER, path.name, folder]
        _run([*command, json.dumps(words)], path)
        steps = {rank: _first_step(Path(folder, f"rank-{rank}.jsonl")) for rank in range(options.n)}
    return {rank: step for rank, step in steps.items() if step is not None}


def _run(command: list[str], path: Path) -> None:
    try:
        ran = subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": HASH_SEED},
            cwd=path.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"{path} was written, and has made no step in {TIMEOUT_S:.0f} s under torchrun.",
            do="run it yourself, without --check",
        ) from error
    if ran.returncode:
        raise ExportError(
            f"{path} was written, and fails under torchrun before its first step is over.",
            why=_end_of_traceback(ran.stderr),
            do="see above what the script is without, export that too, or mend the script",
        )


def _end_of_traceback(said: str) -> str:
    """Return the end of what one rank has said: torch puts `[rank0]: ` before each line of it."""
    lines = said.splitlines()
    first = next((found[0] for line in lines if (found := _OF_RANK.match(line))), "")
    mine = [line.removeprefix(first) for line in lines if first and line.startswith(first)]
    mine = [line for line in mine if "<frozen runpy>" not in line and _RUNNER_FILE not in line]
    return "\n".join(mine[-_MOST_LINES:])


def _first_step(records: Path) -> Mapping[str, float] | None:
    if not records.exists():
        return None
    rows = map(json.loads, records.read_text(encoding="utf-8").splitlines())
    return next((row["values"] for row in rows if row["kind"] == "step"), None)
