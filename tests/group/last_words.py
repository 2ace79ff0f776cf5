"""How a process of a test ended: its signal or exit code, and what its standard error said last.

The process writes to a file, which outlives it. Python's faulthandler is on there, so that a crash
in C++ leaves the line of Python that it came from, and torch writes the stacks of its threads. A
crash is rare: its whole text is kept among the system's temporary files, as `nbdist-crash-PID.txt`.
"""

import faulthandler
import os
import re
import resource
import signal
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

from nbdist.host import oom

_MOST = 8000  # characters of standard error
_BEFORE = 600  # of them, before a crash: what C++ has said
_INNERMOST = 6  # frames of Python
_INNERMOST_NATIVE = 12  # of C++, on the thread that crashed
_GONE_S = 5.0  # within which a process whose pipe is closed has ended
_LONGEST = 160  # characters of a frame's line
_CRASHED = "Fatal Python error: "  # faulthandler's word
_OF_THREAD = re.compile(r"^SIG[A-Z]+\(\d+\), PID: \d+, Thread \d+:", re.MULTILINE)  # torch's
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
        said = self._said()
        if _CRASHED in said:
            crash_file(process.pid).write_text(said, "utf-8")
        return told(self._end_of(process), said)

    def of_stuck(self, process: BaseProcess) -> str:
        """End a process with SIGABRT, at which it writes down its stacks; return those."""
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGABRT)
        process.join(_GONE_S)
        return self._said()[-_MOST:]

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

    def _said(self) -> str:
        return Path(self.path).read_text("utf-8", "replace").strip() or "nothing"


def crash_file(pid: int | str | None) -> Path:
    """Return where the last words of a process that has crashed are kept."""
    return Path(tempfile.gettempdir()) / f"nbdist-crash-{pid}.txt"


def told(end: str, said: str) -> str:
    """Return how a process ended with its last words; the innermost frames once more, at the end.

    Of a long log often the last lines alone are kept, and a crash says there which modules it had.
    """
    if _CRASHED not in said:
        return f"{end}; its standard error says last:\n{said[-_MOST:]}"
    before, _, crash = said.partition(_CRASHED)
    before, *threads = _OF_THREAD.split(before)
    first_thread = threads[0].splitlines() if threads else []
    frames = [line.strip()[:_LONGEST] for line in first_thread if "frame #" in line]
    current = crash.rpartition("Current thread ")[2]
    lines = [line.strip() for line in current.splitlines() if line.startswith("  File ")]
    return "\n".join(
        [
            *(f"{end}; its standard error says:", said[-_MOST:], end, before.strip()[-_BEFORE:]),
            *frames[:_INNERMOST_NATIVE],
            *lines[:_INNERMOST],
        ]
    )


def has_crashed(error: str) -> bool:
    """Return whether an error of `told` is that of a process that a signal ended in C++."""
    return _CRASHED in error


def speak_into(path: str) -> None:
    """Have this process's standard error go to a file, and its crashes be told there."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 2)
    os.close(fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(2)


def speak_of_threads() -> None:
    """Have a crash tell the stacks of C++ too, of all threads; when torch has been imported."""
    import torch

    torch._C._set_print_stack_traces_on_fatal_signal(True)
