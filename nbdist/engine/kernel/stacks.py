"""The stacks of all threads of this rank: Python frames, and native ones if py-spy is available.

Runs on ipykernel's control thread, also while the main thread is stuck in C++.
"""

import logging
import os
import re
import selectors
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable
from types import FrameType

from nbdist.engine.kernel import location
from nbdist.shared import origins

log = logging.getLogger(__name__)

MAIN = "MainThread"
NATIVE = "MainThread, native"
MAX_LINE_CHARS = 120
_NATIVE_TIMEOUT_S = 5.0


def stacks() -> dict[str, str]:
    """Return the stack of each thread by the thread's name, outermost frame first.

    Of threads with one name all but one have their number behind it.

    The main thread's begins with the cell's line: the frames that run cells are left out. When it
    waits for something to do it is "idle". Its native frames, innermost first, are under NATIVE
    where the `py-spy` program is installed and permitted.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = {}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if name in found or (name == MAIN and ident != main):
            name = f"{name} ({ident})"
        found[name] = _main_stack(frame) if ident == main else _format(traceback.walk_stack(frame))
    if found.get(MAIN) != "idle":
        native = native_frames()
        if native:
            found[NATIVE] = native
    return found


def _main_stack(frame: FrameType) -> str:
    frames = list(traceback.walk_stack(frame))  # innermost first
    cells = [i for i, (f, _) in enumerate(frames) if origins.is_cell(f.f_code.co_filename)]
    if cells:
        return _name_other_cells(_format(shown := frames[: cells[-1] + 1]), shown)
    # An event loop with nothing to do waits in `select`.
    is_idle = location.here.running is None and frame.f_code.co_filename == selectors.__file__
    return "idle" if is_idle else _format(frames)


def _name_other_cells(text: str, frames: list[tuple[FrameType, int]]) -> str:
    """Return a stack with `cell 2` for the file of each cell that is not the running one."""
    *others, running = (f.f_code.co_filename for f, _ in frames)
    for file in {*others} - {running}:
        if (prompt := location.here.prompt_of(file)) and origins.is_cell(file):
            text = text.replace(f'File "{file}"', f"cell {prompt}")
    return text


def _format(frames: Iterable[tuple[FrameType, int]]) -> str:
    outermost_first = reversed(list(frames))
    return "".join(traceback.StackSummary.extract(outermost_first).format())


def native_frames() -> str:
    """Return the main thread's frames in Python and C++, innermost first; "" without py-spy.

    py-spy stops this process for some milliseconds. Containers and systems with yama often forbid
    it, which is only logged.
    """
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--native", "--pid", str(os.getpid())]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_NATIVE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("py-spy gave no native frames: %s", error)
        return ""
    if done.returncode:
        log.warning("py-spy gave no native frames: %s", done.stderr.strip()[-500:])
    return main_block(done.stdout)


def main_block(dump: str) -> str:
    """Return the frames of the main thread in what `py-spy dump` prints."""
    found = re.search(rf'^Thread .*"{MAIN}"\n((?:[ \t]+.*\n?)*)', dump, re.MULTILINE)
    if found is None:
        return ""
    # A C++ function's name may fill a page.
    return "\n".join(
        line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "…"
        for line in found.group(1).rstrip().split("\n")
    )
