"""Read again what could not be read, where that is safe: reads change nothing.

What may pass is tried again after a pause, a few times, and said aloud; what will not pass (a file
that is not there, or may not be read) is not.

Threads: any.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from nbdist.shared.error_text import named
from nbdist.shared.errors import DataError

T = TypeVar("T")
TRIES: Final = 4
PAUSES_S: Final = (0.25, 0.5, 1.0)  # before the second, third and fourth
READ_TIMEOUT_S: Final = 60.0  # for a group of samples; stores have timeouts of their own, and retry

_FOR_GOOD: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
# Libraries of stores whose errors are no OSError, all of them.
_OF_STORES: Final = ("aiohttp", "azure", "botocore", "gcsfs", "http", "requests", "urllib3")
_log = logging.getLogger("nbdist.data")


def may_pass(error: BaseException | None) -> bool:
    """Return whether an error of a read may not come again."""
    if isinstance(error, DataError):
        error = error.__cause__
    if error is None or isinstance(error, (DataError, *_FOR_GOOD)):
        return False
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in _OF_STORES


def read(action: Callable[[], T], where: str, pause: Callable[[float], object] = time.sleep) -> T:
    """Return what `action` reads, at the latest at its last try.

    Args:
        action: Reads; called `TRIES` times at most.
        where: What it reads, for the log.
        pause: Waits so many seconds.
    """
    for nth, pause_s in enumerate(PAUSES_S, 1):
        try:
            return action()
        except Exception as error:
            if not may_pass(error):
                raise
            cause = error.__cause__ if isinstance(error, DataError) else error
            why = named(cause or error)
            _log.warning("%s is read again in %g s (%d of 3): %s", where, pause_s, nth, why)
            pause(pause_s)
    return action()


def tell_stalled(where: str, timeout_s: float, nth: int) -> None:
    """Say that a read is given up and started over."""
    _log.warning("%s gave nothing for %g s; it is read again (%d of 3).", where, timeout_s, nth)


def stalled(where: str, timeout_s: float) -> DataError:
    """Return the error for a read that never ends."""
    return DataError(
        f"{where} could not be read: nothing came for {timeout_s:g} s, {TRIES} times.",
        why="its store or disk is reached, and does not answer",
        do="see to the store, then %dist retry; nbdist.loader(..., timeout=) waits longer",
    )
