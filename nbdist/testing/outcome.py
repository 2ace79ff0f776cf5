"""What a notebook that has run says to the person who reads the test's report: pure."""

import base64
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

NOT_JUDGED = " is not judged: "
_EXPECTED = re.compile(rf"^.+?(?: holds: |{NOT_JUDGED}).+$", re.MULTILINE)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PICTURES = {"image/png": "png", "image/svg+xml": "svg"}
_MAGIC = re.compile(r"^\s*(?:%%distributed|%dist\s+board)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a board, of code cell `cell`; `number` counts those of one cell."""

    cell: int
    number: int
    ending: str
    content: bytes

    @property
    def name(self) -> str:
        """The name of its file."""
        more = f"-{self.number}" if self.number > 1 else ""
        return f"board-cell-{self.cell}{more}.{self.ending}"


class NotebookFailed(Exception):
    """A notebook did not run to its end: the text says which cell, and why, as people read it."""


def code_cells(cells: Sequence[Any]) -> list[Any]:
    """Return the cells that run, in order: cell 1 is the first of them."""
    return [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]


def first_line(source: str) -> str:
    """Return the first line of a cell that says something; below a cell magic two, as one."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("#")] or lines
    shown = 2 if lines and lines[0].startswith("%%") else 1
    return "   ".join(lines[:shown])


def failure(cells: Sequence[Any], index: int, what: str, text: str) -> NotebookFailed:
    """Return the failure of one cell.

    Args:
        cells: All of the notebook's.
        index: Which of them.
        what: Happened to it, such as "failed".
        text: Its error, with colours or without.
    """
    running = code_cells(cells)
    number = next((n for n, cell in enumerate(running, 1) if cell is cells[index]), 0)
    head = f"Cell {number} of {len(running)} {what}: {first_line(cells[index].source)}"
    return NotebookFailed(f"{head}\n\n{plain(text)}")


def shown_error(cell: Any) -> str:
    """Return the error that a cell shows, as IPython wrote it; empty without one."""
    shown = [o.traceback for o in cell.get("outputs", ()) if o.output_type == "error"]
    return "\n".join(shown[-1]) if shown else ""


def plain(text: str) -> str:
    """Return a text without colours."""
    return _ANSI.sub("", text).strip()


def expectations(cells: Sequence[Any]) -> list[str]:
    """Return what `%dist expect` has said in these cells, a line each."""
    return [
        line
        for cell in code_cells(cells)
        if "expect" in cell.source
        for output in cell.get("outputs", ())
        if output.output_type == "stream"
        for line in _EXPECTED.findall(plain(output.text))
    ]


def pictures(cells: Sequence[Any]) -> Iterator[Picture]:
    """Yield the boards' pictures that cells left, also those of cells that failed."""
    for number, cell in enumerate(code_cells(cells), 1):
        if not _MAGIC.search(cell.source):
            continue
        count = 0
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            mime = next((mime for mime in _PICTURES if mime in data), None)
            # Figures of the cell's own stand beside the board.
            if mime is None or data.get("text/plain", "").startswith("<Figure"):
                continue
            count += 1
            is_text = mime.startswith("image/svg")
            content = data[mime].encode() if is_text else base64.b64decode(data[mime])
            yield Picture(number, count, _PICTURES[mime], content)
