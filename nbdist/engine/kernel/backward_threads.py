"""Autograd's threads, which run a backward of the main thread: on a GPU, all of it.

C++ starts them. Their Python stack holds hooks and nothing below, or nothing at all, while the main
thread waits inside C++ for the end of its backward. What they launch and wait for is the main
thread's work: it is recorded as if the main thread did it, at the line that called
`backward()`.

A backward that a program runs on another thread does not count, unless the main thread is in one
at the same moment: autograd does not show for whom a thread works.

Any thread may call.
"""

import sys
import threading
from types import FrameType

from nbdist.engine.compat import torch_hooks
from nbdist.engine.kernel import location
from nbdist.engine.kernel.location import Place


def is_mains() -> bool:
    """Return whether the calling thread is autograd's and runs a backward of the main thread."""
    return torch_hooks.is_in_backward() and torch_hooks.calls_backward(_main_frame())


def place_of_call() -> Place | None:
    """Return the place in a cell that the caller's caller was called from, on any thread."""
    place = location.here.cell_place(
        sys._getframe(1).f_back
    )  # of a thread that C++ started there may be none
    if place is None and torch_hooks.is_in_backward():
        return location.here.cell_place(_main_frame())
    return place


def _main_frame() -> FrameType | None:
    main = threading.main_thread().ident
    return None if main is None else sys._current_frames().get(main)
