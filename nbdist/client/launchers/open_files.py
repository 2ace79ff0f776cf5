"""How many files and sockets a process may have open: what ranks inherit, what is too few."""

import resource
from typing import Final

from nbdist.errors import StartError

# A rank begins with 90, torch, ipyparallel and its own output; a peer, a DataLoader's workers and
# shared tensors take more.
FEWEST: Final = 256
ENOUGH: Final = 4096


def allow_open_files() -> None:
    """Raise this process's own limit to `ENOUGH`, as far as it may; what it starts inherits it.

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


def chosen_limit(soft: int, hard: int) -> int:
    """Return the limit to be set: never lower than it is, nor higher than may be."""
    infinite = resource.RLIM_INFINITY
    if soft == infinite or soft >= ENOUGH:
        return soft
    return ENOUGH if hard == infinite else min(hard, ENOUGH)
