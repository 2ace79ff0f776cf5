"""What every rank does with files, or none: `group/agreement` with the errors of files in words."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from nbdist.engine.checkpoint.folder import reason
from nbdist.engine.checkpoint.training_state import Training
from nbdist.engine.kernel import agreement
from nbdist.shared.errors import CheckpointError, NBDistError, UsageError

T = TypeVar("T")
S = TypeVar("S")

one_error = agreement.one_error


def together(action: Callable[[], T], url: str = "") -> list[T]:
    """Do something on this rank, and return what it gave on every rank; `url` is for errors."""
    return agreement.together(action, partial(_in_words, url))


def each(action: Callable[[], T], url: str = "") -> T:
    """Do something on every rank, and return what it gave on this one."""
    return agreement.each(action, partial(_in_words, url))


def exchanged(find: Callable[[], T], tell: Callable[[T], S], url: str = "") -> tuple[T, list[S]]:
    """Find something on this rank; return it, and what every rank tells of its own."""
    # What is found stays here: it need not pickle.
    mine: list[T] = []

    def find_and_tell() -> S:
        mine.append(find())
        return tell(mine[0])

    every = together(find_and_tell, url)
    return mine[0], every


def from_rank_0(action: Callable[[], T], url: str = "") -> T:
    """Do something on rank 0 alone, and return what it gave, on every rank."""
    return agreement.from_rank_0(action, partial(_in_words, url))


def same(value: str, what: str) -> None:
    """Refuse, on all ranks, what is not the same on all of them. Collective.

    Raises:
        UsageError: It differs; `what` says which call's arguments these are.
    """
    refuse_others(together(lambda: value), what)


def refuse_others(values: list[str], what: str) -> None:
    """Refuse values that are not all the same; one of each rank, as of `same`."""
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise UsageError(
            f"Ranks call {what} differently: rank 0 with {values[0]}, rank {other} with "
            f"{values[other]}.",
            do="call it on all ranks with the same arguments",
        )


def found(find: Callable[[], Training], call: str) -> Training:
    """Return what is found on this rank, which is called the same on all of them. Collective.

    Raises:
        CheckpointError: It is not.
        UsageError: `call` asks for another part of it on each rank.
    """
    training, every = exchanged(find, lambda found: (str(found), found.whole))
    refuse_different(every, call)
    return training


def refuse_different(every: list[tuple[str, str]], call: str) -> None:
    """Refuse trainings that are not called the same; of each rank a `Training` and its `whole`."""
    (first, whole), trainings = every[0], [training for training, _ in every]
    other = next((rank for rank, text in enumerate(trainings) if text != first), None)
    if other is not None:
        others = every[other][1]
        if (whole or others) and (whole == others or not (whole and others)):
            raise UsageError(
                f"Ranks ask {call} for different models or optimizers: rank 0 for {first}; "
                f"rank {other} for {trainings[other]}.",
                do="ask for the same on all ranks",
            )
        raise CheckpointError(
            f"Ranks hold different trainings: rank 0 has {first}; rank {other} {trainings[other]}.",
            why="an older model is alive on some of them; a variable, Out or a scheduler holds it",
            do="del it on all ranks (and Out), or %dist restart and build the model again",
        )


def _in_words(url: str, error: Exception) -> NBDistError:
    return error if isinstance(error, NBDistError) else reason(error, url)
