"""What a rank that died wrote last, past Python: its standard error's descriptor leads to a file.

There Python's faulthandler, glibc and C++ leave why a process had to end.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

MOST_LINES: Final = 5
_MOST_BYTES: Final = 64 * 1024
_FATAL: Final = "Fatal Python error"


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
    """Return the lines that tell most: of faulthandler's report the first ones, else the last."""
    lines = [line for line in text.splitlines() if line.strip()]
    fatal = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if fatal:
        return tuple(lines[fatal[-1] :][:MOST_LINES])
    return tuple(lines[-MOST_LINES:])


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
