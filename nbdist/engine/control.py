"""Answer while the main thread is busy: state, stacks, and letting go of a collective.

Everything here runs on ipykernel's control thread, at any moment, also while the main thread is
blocked in C++ (gloo and autograd release the GIL). Nothing here waits for the main thread.
"""

import os
import resource
import sys
import threading
import traceback
from typing import Any


def state() -> dict[str, Any]:
    """Return what this rank is doing now, for `%dist status` and for recovery.

    Keys: `pid`, `rss_bytes` (resident memory, the highest so far on macOS), `cuda_bytes`
    (allocated by torch), `waiting` (None, or the collective the main thread waits in: `kind`,
    `group`, `seq`, `bytes`, `seconds`), `step` (optimizer steps of the current or last cell),
    `last` (the newest collective's kind), `counts` (collectives launched, by group),
    `group` (generation, re-forms left, backend).
    """
    from nbdist.engine import group, tap, training

    torch = sys.modules["torch"]
    cuda = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    waiting = tap.waiting()
    return {
        "pid": os.getpid(),
        "rss_bytes": _resident_bytes(),
        "cuda_bytes": cuda,
        "waiting": None if waiting is None else waiting.to_wire(),
        "step": training.current_step(),
        "last": tap.last_kind(),
        "counts": tap.counts(),
        "group": group.status(),
    }


def stacks() -> dict[str, str]:
    """Return the Python stack of each thread of this rank, by the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    }


def abort(generation: int) -> int:
    """Free the main thread from a collective it waits in; returns how many links were cut.

    The group is unusable afterwards, until all ranks have re-formed it.

    Args:
        generation: The one meant; an order that comes late does nothing.
    """
    from nbdist.engine import group

    return group.abort(generation)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
