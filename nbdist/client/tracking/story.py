"""Keep what a run can be made again from: its cell, the cells before it, notebook and packages.

Nothing secret: what `hiding` takes for a secret is hidden in all text that is kept.

Threads: everything here runs on a run's own thread.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from nbdist.client.metrics.telemetry import CellInfo
from nbdist.client.tracking import provenance
from nbdist.client.tracking.hiding import hide_in_code, hide_secrets
from nbdist.client.tracking.names import params_of
from nbdist.shared.text import name_ranks

MOST_NOTEBOOK_BYTES = 2_000_000
MOST_CELLS_CHARACTERS = 1_000_000


def story(folder: Path, cells: Sequence[CellInfo]) -> Iterator[tuple[str, bytes]]:
    """Return the files that tell how a run was made, (name, content), the cheap ones first.

    Args:
        folder: The notebook's folder.
        cells: The session's cells so far, in order; the last is the run's own.
    """
    yield "cell.py", hide_in_code(cells[-1].source).encode()
    yield "environment.txt", provenance.environment_text().encode()
    if len(cells) > 1:
        yield "cells.py", cells_text(cells).encode()
    if notebook := notebook_text(provenance.notebook_path(), folder):
        yield "notebook.ipynb", notebook.encode()


def cells_text(cells: Sequence[CellInfo]) -> str:
    """Return a session's cells as one text, oldest first, in the form that editors know as cells.

    A text that grows too long keeps its newest cells, and says so.
    """
    parts: list[str] = []
    left = MOST_CELLS_CHARACTERS
    for info in reversed(cells):
        given = "".join(f"\n# -p {key}={value}" for key, value in params_of(info.params).items())
        where = "all ranks" if len(info.ranks) == info.world_size else name_ranks(info.ranks)
        part = hide_in_code(f"# %% cell {info.number}, on {where}{given}\n{info.source.rstrip()}\n")
        left -= len(part)
        if left < 0:
            parts.append("# (older cells are left out)\n")
            break
        parts.append(part)
    return "\n".join(reversed(parts))


def notebook_text(path: Path | None, folder: Path) -> str:
    """Return the notebook as it is on the disk; empty where that is not known, or too large.

    The browser may hold changes that were not saved; `cells.py` is what ran.
    """
    if path is None:
        return ""
    for candidate in (path, folder / path.name):
        try:
            if candidate.stat().st_size <= MOST_NOTEBOOK_BYTES:
                return _without_secrets(candidate.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue  # the server's path may be of another machine
    return ""


def _without_secrets(notebook: str) -> str:
    """Return a notebook's text without secrets: its code is read as code, its outputs as text."""
    try:
        content = json.loads(notebook)
        for cell in content["cells"]:
            if cell["cell_type"] == "code":
                code = hide_in_code("".join(cell["source"]))
                cell["source"] = code.splitlines(keepends=True)
        notebook = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    except (ValueError, LookupError, TypeError):
        pass  # not as notebooks are; text all the same
    # Line by line: one search through all of it would hold the GIL for long.
    return "".join(map(hide_secrets, notebook.splitlines(keepends=True)))
