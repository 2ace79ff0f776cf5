"""An error on one rank is one error on all of them. Main thread, all ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from nbdist.error_text import named
from nbdist.errors import CheckpointError, NBDistError

T = TypeVar("T")


def together(action: Callable[[], T], kind: type[NBDistError] = CheckpointError) -> T:
    """Do something on every rank, and return what it gave here. Collective.

    Args:
        action: Runs no collective.
        kind: Of the error.

    Raises:
        NBDistError: Of that kind: it raised on some rank; the same on all of them.
    """
    value: Any = None
    failed: Exception | None = None
    try:
        value = action()
    except Exception as error:
        failed = error
    told = None
    if failed is not None:
        is_ours = isinstance(failed, NBDistError)
        told = (failed.what, failed.why, failed.do) if is_ours else (f"{named(failed)}.", "", "")  # type: ignore[attr-defined]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, told)
    ranks = [rank for rank, text in enumerate(everyone) if text is not None]
    if ranks:
        what, why, do = everyone[ranks[0]]
        where = "" if len(ranks) == len(everyone) else f" (on rank {ranks[0]})"
        raise kind(what.rstrip(".") + where + ".", why=why, do=do) from failed
    result: T = value
    return result


def of_rank_0(action: Callable[[], T]) -> T:
    """Do something on rank 0 alone, and return what it gave, on every rank. Collective.

    Raises:
        CheckpointError: It raised; the same on all ranks.
    """
    found = [together(lambda: action() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(found, src=0)
    result: Any = found[0]
    return result  # type: ignore[no-any-return]
