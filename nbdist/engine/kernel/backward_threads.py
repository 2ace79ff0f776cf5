"""Autograd's threads, on which a backward of the main thread runs: on a GPU, all of it.

C++ starts them. Their Python stack holds hooks and nothing below, or nothing at all, while the main
thread waits inside C++ for the end of its backward. What they launch and wait for is the main
thread's work: it is watched as if the main thread did it, and stands at the line that called
`backward()`.

A backward that a program runs on a thread of its own is not meant, unless the main thread is in one
at the same moment: autograd does not tell whose a thread's work is.

Any thread may call.
"""

import sys
import threading
from types import FrameType

from nbdist.engine.compat import torch_hooks
from nbdist.engine.kernel import location
from nbdist.engine.kernel.location import Place


def is_mains() -> bool:
    """Return whether the calling thread, not the main one, runs a backward of the main one."""
    return torch_hooks.is_in_backward() and torch_hooks.calls_backward(_main_frame())


def place_of_call() -> Place | None:
    """Return the place in a cell that the caller's caller was called from, on whatever thread."""
    place = location.here.cell_place(
        sys._getframe(1).f_back
    )  # of a thread that C++ started there may be none
    if place is None and torch_hooks.is_in_backward():
        return location.here.cell_place(_main_frame())
    return place


def _main_frame() -> FrameType | None:
    main = threading.main_thread().ident
    return None if main is None else sys._current_frames().get(main)
