"""The log of nbdist in the notebook's process: a file, never the person's screen.

Without this Python prints warnings and tracebacks of libraries into the cell that runs.
"""

import logging
import os
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import cast

MAX_BYTES = 4 << 20


def log_to(file: Path) -> None:
    """Send what nbdist logs to `file` (0600) from now on, in the place of the one before.

    It is made by the first line. One that cannot be written stops nothing.
    """
    new = _PrivateFile(file, maxBytes=MAX_BYTES, backupCount=1, delay=True)
    new.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("nbdist")
    before = [one for one in ours.handlers if isinstance(one, _PrivateFile)]
    ours.addHandler(new)
    ours.propagate = False
    for one in before:
        ours.removeHandler(one)
        one.close()


class _PrivateFile(RotatingFileHandler):
    """A file of its owner alone, and silence where it cannot be written."""

    def _open(self) -> TextIOWrapper:
        name, mode = self.baseFilename, self.mode
        return cast(TextIOWrapper, open(name, mode, encoding="utf-8", opener=_open_private))

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record: there is no better place to report it."""


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
