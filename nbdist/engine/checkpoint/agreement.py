"""What every rank does with files, or none: `group/agreement` with the errors of files in words."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from nbdist.engine.checkpoint.folder import reason
from nbdist.engine.group import agreement
from nbdist.errors import NBDistError

T = TypeVar("T")

one_error = agreement.one_error


def together(action: Callable[[], T], url: str = "") -> list[T]:
    """Do something on this rank, and return what it gave on every rank; `url` is for errors."""
    return agreement.together(action, partial(_in_words, url))


def each(action: Callable[[], T], url: str = "") -> T:
    """Do something on every rank, and return what it gave on this one."""
    return agreement.each(action, partial(_in_words, url))


def from_rank_0(action: Callable[[], T], url: str = "") -> T:
    """Do something on rank 0 alone, and return what it gave, on every rank."""
    return agreement.from_rank_0(action, partial(_in_words, url))


def _in_words(url: str, error: Exception) -> NBDistError:
    return error if isinstance(error, NBDistError) else reason(error, url)
