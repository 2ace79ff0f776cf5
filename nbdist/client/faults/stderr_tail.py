"""What a rank that died wrote last, past Python: its standard error's descriptor leads to a file.

There Python's faulthandler, glibc and C++ leave why a process had to end.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from nbdist.client.faults.failures import is_users
from nbdist.shared import gpu_errors, origins
from nbdist.shared.gpu_errors import GpuError
from nbdist.shared.text import without_noise

MOST_LINES: Final = 5
_MOST_BYTES: Final = 1024 * 1024  # a kernel's assertion may be told by thousands of threads
_FATAL: Final = "Fatal Python error"
_ABORTED: Final = f"{_FATAL}: Aborted"
_THROWN: Final = "terminate called"  # by the C++ runtime, with the exception's text below it
_FAR: Final = 10  # lines of such a text
_NOISE: Final = "Extension modules:"
_FRAME: Final = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in ')


@dataclass(frozen=True, slots=True)
class LastOutput:
    """What a rank wrote last.

    Attributes:
        lines: What tells most, `MOST_LINES` at most.
        asserted: Lines with assertions of its kernels on a GPU.
        place: The line of the user's own at which it crashed: `cell 7, line 12`; "" if unknown.
    """

    lines: tuple[str, ...] = ()
    asserted: tuple[str, ...] = ()
    place: str = ""

    @property
    def gpu(self) -> GpuError | None:
        """What of CUDA or NCCL made it abort; None for every other end."""
        if not any(line.startswith(_ABORTED) for line in self.lines):
            return None
        return gpu_errors.explain("\n".join((*self.asserted, *self.lines)))


class StderrReader:
    """Remembers how much each rank had written, and reads what came after."""

    def __init__(
        self, folder: Path, ranks: Iterable[int], cells: Mapping[str, int] | None = None
    ) -> None:
        """Begin to count now.

        Args:
            folder: Where the ranks' files are.
            ranks: Whose.
            cells: The numbers of cells, by the names of their files (`origins.cell_file_name`).
        """
        self._folder = folder
        self._cells = cells or {}
        self._before = {rank: _size(self._file(rank)) for rank in ranks}

    def of(self, rank: int) -> LastOutput:
        """Return what `rank` wrote last."""
        try:
            with self._file(rank).open("rb") as file:
                end = file.seek(0, 2)
                # Emptied meanwhile, for it had grown too large: what is there now is new.
                begin = self._before.get(rank, 0)
                begin = begin if begin <= end else 0
                if is_cut := end - begin > _MOST_BYTES:
                    begin = end - _MOST_BYTES
                file.seek(begin)
                text = file.read().decode(errors="replace")
        except OSError:
            return LastOutput()
        return read(text.partition("\n")[2] if is_cut else text, self._cells)

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.stderr"


def read(text: str, cells: Mapping[str, int]) -> LastOutput:
    """Return what a text tells that a rank wrote before its end; `cells` as for `StderrReader`."""
    lines = without_noise(text).splitlines()
    place, frame = _crash(lines, cells)
    telling = telling_lines(lines)
    if frame and frame not in telling:
        telling = (*telling[: MOST_LINES - 1], frame)
    return LastOutput(telling, gpu_errors.assertions(lines), place)


def telling_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the lines that tell most: of faulthandler's report the first ones, else the last.

    Who calls abort() says why first, so that an abort's cause stands above the report.
    """
    lines = [
        line
        for line in gpu_errors.without_frames(lines)
        if line.strip() and not line.startswith(_NOISE)
    ]
    at = _last(lines, _FATAL)
    if at is None:
        return tuple(lines[-MOST_LINES:])
    cause = _cause(lines[:at]) if lines[at].startswith(_ABORTED) else []
    return tuple((cause + lines[at:])[:MOST_LINES])


def _last(lines: Sequence[str], beginning: str) -> int | None:
    return next((i for i in reversed(range(len(lines))) if lines[i].startswith(beginning)), None)


def _crash(lines: Sequence[str], cells: Mapping[str, int]) -> tuple[str, str]:
    """Return where in the user's own code a crash was, in words, and that line of its report.

    Of an earlier cell the number is not known: then the line that has called it is named.
    """
    at = _last(lines, _FATAL)
    found = [] if at is None else [frame for line in lines[at:] if (frame := _FRAME.match(line))]
    own = [frame for frame in found if is_users(frame["file"])]
    places = (_place(frame["file"], frame["line"], cells) for frame in own)
    return next(filter(None, places), ""), own[0].string if own else ""


def _place(file: str, line: str, cells: Mapping[str, int]) -> str:
    name = PurePath(file).name
    if origins.is_cell(file):
        return f"cell {cells[name]}, line {line}" if name in cells else ""
    return f"{name}, line {line}"


def _cause(before: list[str]) -> list[str]:
    """Return what was said last before an abort: a C++ exception's text, or one line."""
    near = before[-_FAR:]
    thrown = [number for number, line in enumerate(near) if line.startswith(_THROWN)]
    return near[thrown[-1] :][: MOST_LINES - 1] if thrown else near[-1:]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
