"""Prove an exported script: run one step of it under torchrun, and compare the loss.

What guesses about a notebook could say at best, this shows: that the script runs alone, and begins
as the notebook did.
"""

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from nbdist.client.export.launch import LaunchFailed, launch, read_records
from nbdist.client.export.parts import trains
from nbdist.client.export.script import Script
from nbdist.shared.errors import NBDistError
from nbdist.shared.text import name_ranks

TIMEOUT_S = 600.0


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
    with tempfile.TemporaryDirectory(prefix="nbdist-check-") as folder:
        _run(path, script, Path(folder))
        steps = {
            rank: next((record.values for record in records if record.kind == "step"), None)
            for rank, records in read_records(Path(folder), script.options.n).items()
        }
    return {rank: step for rank, step in steps.items() if step is not None}


def _run(path: Path, script: Script, folder: Path) -> None:
    try:
        launch(path, script.options, folder, timeout_s=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"{path} was written, and has made no step in {TIMEOUT_S:.0f} s under torchrun.",
            do="run it yourself, without --check",
        ) from error
    except LaunchFailed as failed:
        raise ExportError(
            f"{path} was written, and fails under torchrun before its first step is over.",
            why=str(failed),
            do="see above what the script is without, export that too, or mend the script",
        ) from None
