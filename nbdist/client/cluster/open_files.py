"""How many files and sockets a process may have open: what ranks inherit, what is too few.

A start sees to both before it opens anything: what runs out halfway ends threads of libraries,
whose callers then report another error.
"""

import errno
import os
import resource
from typing import Final

from nbdist.shared.errors import StartError

# A rank begins with 90, torch, ipyparallel and its own output; a peer, a DataLoader's workers and
# shared tensors take more.
FEWEST: Final = 256
ENOUGH: Final = 4096
# A start opens 28 here, most of them ipyparallel's sockets, and a run that is tracked 5 more.
FEWEST_FREE: Final = 48


def allow_open_files() -> None:
    """Raise the limit of this process to `ENOUGH`, as far as it may; what it starts inherits it.

    Raises:
        StartError: Fewer than `FEWEST` are allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = chosen_limit(soft, hard)
    if wanted != soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            wanted = soft  # the system has a limit of its own
    if wanted != resource.RLIM_INFINITY and wanted < FEWEST:
        raise StartError(
            f"A process may have only {wanted} files open here, and a rank needs {FEWEST}.",
            why=f"the limit is {soft} (ulimit -n), and may be raised to {hard} at most "
            "(ulimit -Hn).",
            do=f"ulimit -n {ENOUGH} in the shell that starts Jupyter, or ask who set the limit.",
        )


def require_files_to_start() -> None:
    """See to it that this process may open what a start opens.

    Raises:
        StartError: Too few files are allowed, or too few of them are left.
    """
    allow_open_files()
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return
    free = _count_free(FEWEST_FREE)
    if free < FEWEST_FREE:
        raise StartError(
            f"The notebook's kernel can open only {free} more files, and a start needs "
            f"{FEWEST_FREE}.",
            why=f"too many open files: it may have {allowed} (ulimit -n), and has nearly all of "
            "them open.",
            do="close what the notebook has opened, or restart the kernel; "
            f"ulimit -n {ENOUGH} in the shell that starts Jupyter allows that many.",
        )


def _count_free(most: int) -> int:
    """Return how many files can still be opened, up to `most`: by opening them."""
    opened: list[int] = []
    try:
        while len(opened) < most:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        # ENFILE: the limit of the whole machine.
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return len(opened)


def chosen_limit(soft: int, hard: int) -> int:
    """Return the limit to be set: never lower than it is, nor higher than may be."""
    infinite = resource.RLIM_INFINITY
    if soft == infinite or soft >= ENOUGH:
        return soft
    return ENOUGH if hard == infinite else min(hard, ENOUGH)
