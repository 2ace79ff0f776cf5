"""Find where the main thread is: the cell, its line, and the function.

Cells are known by the file names that IPython gives them, scripts that ran as cells by their own.
Any thread may call.
"""

import linecache
import os
import sys
import threading
from types import FrameType
from typing import Any

from nbdist.shared import origins

Place = tuple[str, int]  # file, line


class Location:
    """The running cell, and the files of cells."""

    def __init__(self) -> None:
        self.running: int | None = None  # number of the cell that runs; set by `rank/boot`
        self.script: str | None = None  # file of the script that runs as this cell; likewise
        # The prompt's number (`In [7]`) of each cell's file; functions run long after their cells.
        self._prompts: dict[str, int] = {}
        self._scripts: dict[int, str] = {}  # by the prompts of those that ran as cells

    def name_cell(self, file: str, prompt: int) -> None:
        """Remember which prompt a cell's file belongs to."""
        self._prompts[file] = prompt
        self._scripts.pop(prompt, None)
        if not origins.is_cell(file):
            self._scripts[prompt] = os.path.basename(file)

    def prompt_of(self, file: str) -> int:
        """Return the number of the prompt a cell's file belongs to; 0 when it is not known."""
        return self._prompts.get(file, 0)

    def hand_over(self) -> dict[str, Any]:
        """Return the numbers and lines of all cells: a new rank has functions that they defined."""
        lines = {file: linecache.getlines(file) for file in self._prompts if origins.is_cell(file)}
        return {"prompts": self._prompts, "scripts": self._scripts, "lines": lines}

    def take_over(self, handed: dict[str, Any]) -> None:
        """Know, on a new rank, what `hand_over` returned."""
        self._prompts |= handed.get("prompts", {})
        self._scripts |= handed.get("scripts", {})
        for file, lines in handed.get("lines", {}).items():
            # As IPython does it: what has no time is kept.
            linecache.cache[file] = (sum(map(len, lines)), None, lines, file)

    def name_running(self) -> str:
        """Return the name of the running cell in sentences: `the cell`, or a script's name."""
        return os.path.basename(self.script) if self.script is not None else "the cell"

    def describe_line(self, prompt: int, line: int) -> str:
        """Return e.g. `cell 7, line 5` or `train.py, line 5`, without what is unknown (zero)."""
        where = self._scripts.get(prompt) or f"cell {prompt}"
        return ", ".join([where] * bool(prompt) + [f"line {line}"] * bool(line))

    def cell_place(self, frame: FrameType | None) -> Place | None:
        """Return the innermost place in code of a cell, from `frame` outwards."""
        while frame is not None:
            file = frame.f_code.co_filename
            if origins.is_cell(file) or file in self._prompts:
                return file, frame.f_lineno
            frame = frame.f_back
        return None

    def main_thread(self) -> dict[str, Any] | None:
        """Return where the main thread is in a cell now, or None outside of cells.

        Returns:
            `file_line` ("file:line" in the cell), `line`, and `function`: the innermost function
            that is not nbdist's, "" for the cell's own lines. `cell`: the prompt's number of
            another cell, whose function the running one is in; else 0.
        """
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main) if main is not None else None
        place = self.cell_place(frame)
        if place is None:
            return None
        other = self._other_cell(frame, place[0])
        while frame is not None and _is_wrapping(frame):
            frame = frame.f_back
        function = frame.f_code.co_qualname if frame is not None else ""
        return {
            "file_line": describe(place),
            "line": place[1],
            "cell": other,
            "function": "" if function == "<module>" else function.replace(".<locals>", ""),
        }

    def _other_cell(self, frame: FrameType | None, file: str) -> int:
        """Return the prompt's number of a cell, unless its file is the running cell's: 0."""
        running = file
        while frame is not None:
            if origins.is_cell(frame.f_code.co_filename):
                running = frame.f_code.co_filename  # the outermost is last
            frame = frame.f_back
        return 0 if running == file else self.prompt_of(file)


def describe(place: Place | None) -> str | None:
    """Return a place as "file:line"."""
    return None if place is None else f"{place[0]}:{place[1]}"


def _is_wrapping(frame: FrameType) -> bool:
    """Return whether a frame only wraps what the user called: ours, or c10d's logger."""
    if frame.f_globals.get("__name__") == "torch.distributed.c10d_logger":
        return True
    return origins.is_of(frame.f_code.co_filename, "nbdist")


here = Location()
