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


class HeldInterrupts:
    """What must be whole now, and the interrupts that wait for it."""

    def __init__(self) -> None:
        self._holds = False  # our handler is there, and lets interrupts wait
        # Numbers, with the message that ran. A signal handler may put; most other queues would
        # lock up.
        self._arrived: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
        self._longest_s = LONGEST_S  # of what runs now
        self._count = 0  # interrupts that have had to wait
        self._over = 0  # how many of them came in steps that have ended
        self._watch: threading.Thread | None = None

    def begin(self, longest_s: float = LONGEST_S) -> None:
        """A step begins, or what else must be whole."""
        self._longest_s = longest_s
        if self._watch is None:
            self._watch = threading.Thread(
                target=self._strike_late, name="nbdist-interrupt", daemon=True
            )
            self._watch.start()
            interrupts.here.in_code = self._wait
        # Once put there it stays for the cell: to change it at each step is two system calls.
        handler = _handler(_INTERRUPT)
        if handler is signal.default_int_handler:
            _set_handler(_INTERRUPT, self._wait)
        self._holds = True  # also after a step that has failed, and so has no end

    def end(self) -> None:
        """The step is whole: an interrupt that has come meanwhile strikes soon."""
        self._holds = False
        self._over = self._count

    def start_workers_whole(self, native: Callable[..., None]) -> Callable[..., None]:
        """Wrap what starts a DataLoader's workers, so that it is not interrupted."""

        @wraps(native)
        def start(*args: Any, **kwargs: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                return native(*args, **kwargs)
            self.begin(LONGEST_START_S)
            try:
                native(*args, **kwargs)
            finally:
                self.end()

        return start

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if not self._holds:
            signal.default_int_handler(number, frame)
        self._holds = False  # from here on as always: the next one strikes
        self._count += 1
        self._arrived.put((self._count, interrupts.here.running))

    def _strike_late(self) -> None:
        """Interrupt when the step has ended, or has not ended in time; a thread of its own."""
        while True:
            number, message = self._arrived.get()
            deadline = time.monotonic() + self._longest_s
            while number > self._over and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            time.sleep(SETTLE_S)
            interrupts.here.strike(message)

    def after_fork(self) -> None:
        """Let interrupts strike at once in a fork, which has no thread that strikes late."""
        self._watch = None
        self.end()


here = HeldInterrupts()
os.register_at_fork(after_in_child=here.after_fork)
