"""How a process of a test ended: its signal or exit code, and what its standard error said last.

The process writes to a file, which outlives it. Python's faulthandler is on there, so that a crash
in C++ leaves the line of Python that it came from.
"""

import faulthandler
import os
import resource
import signal
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

from nbdist.host import oom

_MOST = 8000  # characters of standard error
_BEFORE = 600  # of them, before a crash: what C++ has said
_INNERMOST = 6  # frames
_GONE_S = 5.0  # within which a process whose pipe is closed has ended
_NO_PARENT = 255  # what multiprocessing tells where its fork server has died


class LastWords:
    """One process's standard error, and the witness of its end. Used by the test's process."""

    def __init__(self) -> None:
        fd, self.path = tempfile.mkstemp(prefix="nbdist-stderr-")
        os.close(fd)
        self._watch = oom.OomWatch()

    def watch(self, process: BaseProcess) -> None:
        """Begin to look after the process that hears of `path`."""
        assert process.pid is not None
        self._watch.add(process.pid)

    def of(self, process: BaseProcess) -> str:
        """Return how a process ended that has closed its pipe, with what it said last."""
        process.join(_GONE_S)
        return told(self._end_of(process), self._tail())

    def of_stuck(self, process: BaseProcess) -> str:
        """End a process with SIGABRT, at which it writes down its stacks; return those."""
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGABRT)
        process.join(_GONE_S)
        return self._tail()

    def close(self) -> None:
        """Remove the file."""
        Path(self.path).unlink(missing_ok=True)

    def _end_of(self, process: BaseProcess) -> str:
        code = process.exitcode
        if code is None:
            return f"process {process.pid} closed its pipe and lives"
        if code == _NO_PARENT:
            return f"process {process.pid} exited with {code}, or its fork server did"
        if code >= 0:
            return f"process {process.pid} exited with {code}"
        by = f"process {process.pid} was killed by {signal.Signals(-code).name}"
        return f"{by}, {more}" if (more := self._watch.explain(process.pid or 0, code)) else by

    def _tail(self) -> str:
        said = Path(self.path).read_text("utf-8", "replace")
        return said[-_MOST:].strip() or "nothing"


def told(end: str, said: str) -> str:
    """Return how a process ended with its last words; the innermost lines once more, at the end.

    Of a long log often the last lines alone are kept, and a crash says there which modules it had.
    """
    crash = said.rpartition("Fatal Python error: ")[2] if "Fatal Python error: " in said else ""
    if not crash:
        return f"{end}; its standard error says last:\n{said}"
    before = said.partition("Fatal Python error: ")[0].strip()[-_BEFORE:]
    current = crash.rpartition("Current thread ")[2]
    innermost = [line.strip() for line in current.splitlines() if line.startswith("  File ")]
    return "\n".join(
        [f"{end}; its standard error says:", said, end, before, *innermost[:_INNERMOST]]
    )


def speak_into(path: str) -> None:
    """Have this process's standard error go to a file, and its crashes be told there."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 2)
    os.close(fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(2)
