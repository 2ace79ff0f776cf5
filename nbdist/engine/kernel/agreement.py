"""Do something on all ranks or on none: an error on one rank is raised on all of them.

Main thread, all ranks; a collective of small objects over the default group each time.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from nbdist.shared.error_text import named
from nbdist.shared.errors import CheckpointError, NBDistError, UsageError
from nbdist.shared.text import name_ranks

T = TypeVar("T")
Explain = Callable[[Exception], NBDistError]


def in_words(error: Exception) -> NBDistError:
    """Return any error as an NBDistError."""
    return error if isinstance(error, NBDistError) else CheckpointError(f"{named(error)}.")


def together(
    action: Callable[[], T],
    explain: Explain = in_words,
    kind: type[NBDistError] = CheckpointError,
) -> list[T]:
    """Run an action on every rank, and return the results by rank. Collective.

    Args:
        action: Runs no collective.
        explain: Puts an error of the action into words for people.
        kind: Of the error that is raised.

    Raises:
        NBDistError: Of that kind: it raised on some rank; the same on all of them.
        UsageError: Likewise, where it raised one.
    """
    every = _exchanged(_tried(action, explain))
    failed = {rank: error for rank, (_, error) in enumerate(every) if error is not None}
    if failed:
        raise one_error(failed, len(every), kind) from failed.get(dist.get_rank())
    return [value for value, _ in every]


def each(
    action: Callable[[], T],
    explain: Explain = in_words,
    kind: type[NBDistError] = CheckpointError,
) -> T:
    """Run an action on every rank, and return this rank's result; otherwise as `together`."""
    mine: list[T] = []
    together(lambda: mine.append(action()), explain, kind)
    return mine[0]


def from_rank_0(action: Callable[[], T], explain: Explain = in_words) -> T:
    """Run an action on rank 0 only, and return its result on every rank; else as `together`."""
    mine = _tried(action, explain) if dist.get_rank() == 0 else (None, None)
    value, error = _exchanged(mine)[0]
    if error is not None:
        raise one_error({0: error}, 1) from error
    return value  # type: ignore[no-any-return]


def one_error(
    failed: Mapping[int, NBDistError], asked: int, kind: type[NBDistError] = CheckpointError
) -> NBDistError:
    """Describe the error of some ranks: the first one's, and on which ranks it was raised."""
    first = failed[min(failed)]
    same = [rank for rank, error in failed.items() if str(error) == str(first)]
    where = "" if len(same) == asked else f" (on {name_ranks(same)})"
    chosen = UsageError if isinstance(first, UsageError) else kind
    return chosen(first.what.rstrip(".") + where + ".", why=first.why, do=first.do)


def _tried(action: Callable[[], Any], explain: Explain) -> tuple[Any, NBDistError | None]:
    try:
        return action(), None
    except Exception as error:
        return None, explain(error)


def _exchanged(mine: tuple[Any, NBDistError | None]) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
