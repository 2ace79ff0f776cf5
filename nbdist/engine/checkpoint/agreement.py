"""What every rank does, or none: an error on one is the same error on all of them.

Main thread, all ranks; a collective of small objects over the default group each time.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from nbdist.engine.checkpoint.folder import reason
from nbdist.errors import CheckpointError, NBDistError, UsageError
from nbdist.ranks import name_ranks

T = TypeVar("T")


def together(action: Callable[[], T], url: str = "") -> list[T]:
    """Do something on this rank, and return what it gave on every rank, by rank. Collective.

    Args:
        action: Runs no collective.
        url: What it reads or writes, for errors of files.

    Raises:
        CheckpointError: It raised on some rank; the same on all of them.
        UsageError: Likewise, where it raised one.
    """
    mine: tuple[Any, NBDistError | None]
    try:
        mine = action(), None
    except NBDistError as error:
        mine = None, error
    except Exception as error:
        mine = None, reason(error, url)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    failed = {rank: error for rank, (_, error) in enumerate(every) if error is not None}
    if failed:
        raise one_error(failed) from failed.get(dist.get_rank())
    return [value for value, _ in every]


def each(action: Callable[[], T], url: str = "") -> T:
    """Do something on every rank, and return what it gave on this one; else as `together`."""
    mine: list[T] = []
    together(lambda: mine.append(action()), url)
    return mine[0]


def from_rank_0(action: Callable[[], T], url: str = "") -> T:
    """Do something on rank 0 alone, and return what it gave, on every rank; else as `together`."""
    return together(lambda: action() if dist.get_rank() == 0 else None, url)[0]  # type: ignore[return-value]


def one_error(failed: dict[int, NBDistError]) -> NBDistError:
    """Return what is said of an error of some ranks: the first one's, and whose it was."""
    first = failed[min(failed)]
    alike = [rank for rank, error in failed.items() if str(error) == str(first)]
    where = "" if len(alike) == dist.get_world_size() else f" (on {name_ranks(alike)})"
    kind = UsageError if isinstance(first, UsageError) else CheckpointError
    return kind(first.what.rstrip(".") + where + ".", why=first.why, do=first.do)
