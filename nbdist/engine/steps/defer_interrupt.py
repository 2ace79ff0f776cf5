"""Let an interrupt wait until what must not be halved is whole: a step, a DataLoader's workers.

Half an optimizer's step cannot be made again. Between the tensors of a step Python runs, and an
interrupt would strike there: a part of the parameters has then made the step, and the others have
not. A step takes milliseconds. One that takes longer than `LONGEST_S` is interrupted all the same,
and so is one that is interrupted twice. After the step an interrupt waits `SETTLE_S` more, in which
a scheduler makes its own. And a worker that a DataLoader has started and not noted yet would run on
for ever (torch's `_MultiProcessingDataLoaderIter.__init__`).

Main thread, in a cell, where an interrupt raises KeyboardInterrupt; elsewhere nothing is done.
"""

import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import wraps
from queue import SimpleQueue
from types import FrameType
from typing import Any

from nbdist.engine.kernel import interrupts

LONGEST_S = 0.2
LONGEST_START_S = 2.0  # of workers
SETTLE_S = 0.002
_LOOK_S = 0.001
# As in `signal`, which also makes enums of handlers: that costs a step 20 us.
_set_handler: Callable[..., Any] = _signal.signal
_handler: Callable[[int], Any] = _signal.getsignal
_INTERRUPT = int(signal.SIGINT)

_holds = False  # our handler is there, and lets interrupts wait
# Numbers, with the message that ran. A signal handler may put; most other queues would lock up.
_arrived: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
_longest_s = LONGEST_S  # of what runs now
_count = 0  # interrupts that have had to wait
_over = 0  # how many of them came in steps that have ended
_watch: threading.Thread | None = None


def begin(longest_s: float = LONGEST_S) -> None:
    """A step begins, or what else must be whole."""
    global _holds, _watch, _longest_s
    _longest_s = longest_s
    if _watch is None:
        _watch = threading.Thread(target=_strike_late, name="nbdist-interrupt", daemon=True)
        _watch.start()
    # Once put there it stays for the cell: to change it at each step is two system calls.
    handler = _handler(_INTERRUPT)
    if handler is signal.default_int_handler:
        _set_handler(_INTERRUPT, _wait)
    # Also after a step that has failed, and so has no end. Any other handler is the program's own.
    _holds = handler is signal.default_int_handler or handler is _wait


def end() -> None:
    """The step is whole: an interrupt that has come meanwhile strikes soon."""
    global _holds, _over
    _holds = False
    _over = _count


def start_workers_whole(native: Callable[..., None]) -> Callable[..., None]:
    """Wrap what starts a DataLoader's workers, so that it is not interrupted."""

    @wraps(native)
    def start(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return native(*args, **kwargs)
        begin(LONGEST_START_S)
        try:
            native(*args, **kwargs)
        finally:
            end()

    return start


def _wait(number: int, frame: FrameType | None) -> None:
    global _holds, _count
    if not _holds:
        signal.default_int_handler(number, frame)
    _holds = False  # from here on as always: the next one strikes
    _count += 1
    _arrived.put((_count, interrupts.running))


def _strike_late() -> None:
    """Interrupt when the step has ended, or has not ended in time; a thread of its own."""
    while True:
        number, message = _arrived.get()
        deadline = time.monotonic() + _longest_s
        while number > _over and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        time.sleep(SETTLE_S)
        interrupts.strike(message)


def _in_child() -> None:
    """Let interrupts strike at once in a fork, which has no thread that strikes late."""
    global _watch
    _watch = None
    end()


os.register_at_fork(after_in_child=_in_child)
