"""`%dist export` and `nbdist export`: what the kernel has run, or a file's cells, as a script.

The kernel's history is written by IPython's events, on the main thread.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbdist.client.export.export import Exported, ExportRequest, export
from nbdist.client.export.notebook_cells import History, read_notebook
from nbdist.client.notebook.arguments import parse_dist, parse_distributed
from nbdist.errors import UsageError

_history = History()
_is_watched = False


def watch(shell: Any) -> None:
    """Note what this kernel runs from here on; what it ran before is taken as it stands."""
    global _is_watched
    _is_watched = True
    earlier = getattr(shell.history_manager, "input_hist_raw", [])
    for number, source in enumerate(earlier[:-1]):  # the last is the cell that loads nbdist
        if source:
            _history.note_run(number, source, None, has_failed=False)
    shell.events.register("post_run_cell", _note_run)


def note_sent(code: str, values: Mapping[str, object], ranks: str) -> None:
    """Note what the cell that runs has sent to ranks: code, or values."""
    if not _is_watched:
        return  # a program's session
    if code:
        _history.note_code(code)
    _history.note_push(values, ranks)


def note_failed_attempt() -> None:
    """Note that what the cell that runs let ranks run has failed, and runs again."""
    if _is_watched:
        _history.note_failed_attempt()


def _note_run(result: Any) -> None:
    info = result.info
    if info is None or not info.store_history or not info.raw_cell:
        return
    cell_id = getattr(info, "cell_id", None)
    _history.note_run(
        result.execution_count or 0, info.raw_cell, cell_id, has_failed=not result.success
    )


def export_history(asked: argparse.Namespace) -> Exported:
    """Export what this kernel has run; raises as `export`."""
    from nbdist.client.notebook import current
    from nbdist.client.tracking.provenance import notebook_path

    path = notebook_path()
    running = current.current().options if current.is_running() else None
    return export(
        _request(asked),
        _history.cells(),
        parse_dist,
        parse_distributed,
        notebook=path.name if path else "",
        folder=Path.cwd(),
        running=running,
    )


def export_file(asked: argparse.Namespace) -> Exported:
    """Export the cells of a notebook's file, without a kernel; raises as `export`."""
    notebook = Path(asked.notebook).expanduser()
    if notebook.suffix != ".ipynb":
        raise UsageError(f"nbdist export takes a notebook and a script, and {notebook} is none.")
    cells = read_notebook(notebook)
    return export(
        _request(asked),
        cells,
        parse_dist,
        parse_distributed,
        notebook=notebook.name,
        folder=notebook.parent,
    )


def _request(asked: argparse.Namespace) -> ExportRequest:
    return ExportRequest(
        Path(asked.path).expanduser(),
        asked.format,
        asked.cells or "",
        asked.force,
        asked.time or "",
        asked.partition or "",
        asked.nodes,
        tuple(asked.sbatch or ()),
    )
