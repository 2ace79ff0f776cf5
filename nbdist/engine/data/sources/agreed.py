"""List and count a source's files once over all ranks, with the same result on each.

Rank 0 lists; the files' footers are shared out, and read in a few threads, for a store may take a
tenth of a second for each. Main thread, all ranks, while the loader is made. The threads end here.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch.distributed as dist

from nbdist.engine.data.sources.urls import reason
from nbdist.engine.kernel import agreement
from nbdist.shared.errors import DataError, NBDistError

T = TypeVar("T")
F = TypeVar("F")
_THREADS = 16  # they wait for a store most of the time


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def from_rank_0(action: Callable[[], T], name: str) -> T:
    """Return what `action` gives on rank 0, on every rank. Collective.

    Args:
        action: Runs on rank 0 alone; what it gives can be pickled.
        name: Of the source, for errors.

    Raises:
        DataError: It failed; the same on all ranks.
        UsageError: Likewise, where it raised one.
    """
    if _is_alone():
        try:
            return action()
        except Exception as error:
            raise reason(error, name) from error
    return agreement.together(
        lambda: action() if dist.get_rank() == 0 else None,
        lambda error: reason(error, name),
        DataError,
    )[0]  # type: ignore[return-value]


def for_each(about: Callable[[F], T], files: Sequence[F], name: str) -> list[T]:
    """Return what `about` finds of each file; a rank does its share of them. Collective.

    Args:
        about: Reads what is to be known of one file; on several threads.
        files: The same on all ranks.
        name: Of the source, for errors.

    Raises:
        DataError: It failed for a file, the first one; the same on all ranks.
    """
    rank, ranks = (0, 1) if _is_alone() else (dist.get_rank(), dist.get_world_size())
    mine = files[rank::ranks]

    def found() -> list[T]:
        if not mine:
            return []
        with ThreadPoolExecutor(min(_THREADS, len(mine)), "nbdist-footers") as threads:
            return list(threads.map(about, mine))

    def explained(error: Exception) -> NBDistError:
        return reason(error, name)

    if ranks == 1:
        try:
            return found()
        except Exception as error:
            raise explained(error) from error
    every = agreement.together(found, explained, DataError)
    return [every[nth % ranks][nth // ranks] for nth in range(len(files))]
