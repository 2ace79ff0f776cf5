"""`%dist export` and `nbdist export`: what the kernel has run, or a file's cells, as a script.

The kernel's history is written by IPython's events, on the main thread.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbdist.client.export.cells import NotebookCell, read_notebook
from nbdist.client.export.check import check
from nbdist.client.export.export import Exported, ExportRequest, export
from nbdist.client.export.history import History
from nbdist.client.metrics.changes import Change
from nbdist.client.notebook.arguments import parse_dist, parse_distributed
from nbdist.shared.errors import UsageError
from nbdist.shared.options import ClusterOptions


def watch(shell: Any) -> None:
    """Note what this kernel runs from here on; before that, IPython's history counts."""
    here.is_watched = True
    earlier = getattr(shell.history_manager, "input_hist_raw", [])
    for number, source in enumerate(earlier[:-1]):  # the last is the cell that loads nbdist
        if source:
            trouble = "has not run: nbdist was not loaded" if "%%distributed" in source else ""
            here.note_run(number, source, None, has_failed=False, trouble=trouble)
    shell.events.register("post_run_cell", _note_run)


def note_sent(code: str, values: Mapping[str, object], ranks: str) -> None:
    """Note what the cell that runs has sent to ranks: code, or values."""
    if not here.is_watched:
        return  # a program's session
    if code:
        here.note_code()
    here.note_push(values, ranks)


def note_trained(losses: Mapping[int, float], changes: Sequence[Change]) -> None:
    """Note a training of the cell that runs: first losses by rank, and what was changed in it."""
    if here.is_watched:
        here.note_trained(losses, changes)


def _note_run(result: Any) -> None:
    info = result.info
    if info is None or not info.store_history or not info.raw_cell:
        return
    cell_id = getattr(info, "cell_id", None)
    here.note_run(
        result.execution_count or 0, info.raw_cell, cell_id, has_failed=not result.success
    )


def export_history(asked: argparse.Namespace, running: ClusterOptions | None) -> None:
    """Export what this kernel has run, and print its notices; raises as `export`.

    Args:
        asked: The words of `%dist export`.
        running: What the cluster runs with, if there is one.
    """
    from nbdist.client.tracking.provenance import notebook_path

    path = notebook_path()
    cells = here.cells()
    made = export(
        _request(asked),
        cells,
        parse_dist,
        parse_distributed,
        notebook=path.name if path else "",
        folder=Path.cwd(),
        running=running,
    )
    _tell(made, cells, is_checked=asked.check)


def export_file(asked: argparse.Namespace) -> None:
    """Export the cells of a notebook's file, without a kernel; raises as `export`."""
    notebook = Path(asked.notebook).expanduser()
    if notebook.suffix != ".ipynb":
        raise UsageError(f"nbdist export takes a notebook and a script, and {notebook} is none.")
    cells = read_notebook(notebook, parse_dist)
    made = export(
        _request(asked),
        cells,
        parse_dist,
        parse_distributed,
        notebook=notebook.name,
        folder=notebook.parent,
    )
    _tell(made, cells, is_checked=asked.check)


def _tell(made: Exported, cells: Sequence[NotebookCell], *, is_checked: bool) -> None:
    """Print what was written, and where that is asked for, how its first step compares."""
    print(made)
    if is_checked:
        kept = made.script.cells
        first = next((cell for cell in cells if cell.losses and cell.number in kept), None)
        print(check(made.files[0], made.script, first.losses if first else {}))


def _request(asked: argparse.Namespace) -> ExportRequest:
    return ExportRequest(
        Path(asked.path).expanduser(),
        asked.format,
        asked.cells or "",
        asked.skip or "",
        asked.force,
        asked.time or "",
        asked.partition or "",
        asked.nodes,
        tuple(asked.sbatch or ()),
    )


here = History()
