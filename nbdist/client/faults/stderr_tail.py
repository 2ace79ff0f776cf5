"""What a rank that died wrote last, past Python: its standard error's descriptor leads to a file.

There Python's faulthandler, glibc and C++ leave why a process had to end.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from nbdist.noise import without_noise

MOST_LINES: Final = 5
_MOST_BYTES: Final = 64 * 1024
_FATAL: Final = "Fatal Python error"
_ABORTED: Final = f"{_FATAL}: Aborted"
_THROWN: Final = "terminate called"  # by the C++ runtime, with the exception's text below it
_FAR: Final = 10  # lines of such a text
_NOISE: Final = "Extension modules:"


class LastWords:
    """Remembers how much each rank had written, and reads what came after."""

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        """Begin to count now.

        Args:
            folder: Where the ranks' files are.
            ranks: Whose.
        """
        self._folder = folder
        self._before = {rank: _size(self._file(rank)) for rank in ranks}

    def of(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of `rank`, `MOST_LINES` at most."""
        try:
            with self._file(rank).open("rb") as file:
                end = file.seek(0, 2)
                # Emptied meanwhile, for it had grown too large: what is there now is new.
                begin = self._before.get(rank, 0)
                file.seek(max(begin if begin <= end else 0, end - _MOST_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ()
        return telling_lines(text)

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.stderr"


def telling_lines(text: str) -> tuple[str, ...]:
    """Return the lines that tell most: of faulthandler's report the first ones, else the last.

    Who calls abort() says why first, so that an abort's cause stands above the report.
    """
    lines = [
        line
        for line in without_noise(text).splitlines()
        if line.strip() and not line.startswith(_NOISE)
    ]
    fatal = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if not fatal:
        return tuple(lines[-MOST_LINES:])
    at = fatal[-1]
    cause = _cause(lines[:at]) if lines[at].startswith(_ABORTED) else []
    return tuple((cause + lines[at:])[:MOST_LINES])


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
