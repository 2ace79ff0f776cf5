"""Let an interrupt wait until an optimizer's step is whole: half a step cannot be made again.

Between the tensors of a step Python runs, and an interrupt would strike there: a part of the
parameters has then made the step, and the others have not. A step takes milliseconds. One that
takes longer than `LONGEST_S` is interrupted all the same, and so is one that is interrupted twice.

Main thread, in a cell, where an interrupt raises KeyboardInterrupt; elsewhere nothing is done.
"""

import signal
import threading
from typing import Any

LONGEST_S = 0.2

_holds = False  # the handler is ours
_late: threading.Timer | None = None  # interrupts again, when the step has not ended by then


def begin() -> None:
    """A step begins."""
    global _holds
    before = signal.signal(signal.SIGINT, _wait)
    # Ours is still there when a step has failed, and so has no end.
    _holds = before in (signal.default_int_handler, _wait)
    if not _holds and before is not None:  # None: a handler in C, which Python cannot put back
        signal.signal(signal.SIGINT, before)


def end() -> None:
    """The step is whole.

    Raises:
        KeyboardInterrupt: One has come meanwhile.
    """
    global _holds, _late
    if _holds:
        _holds = False
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _late is not None:
        late, _late = _late, None
        if late.is_alive():
            late.cancel()
            raise KeyboardInterrupt


def _wait(*_: Any) -> None:
    global _holds, _late
    _holds = False
    # From here on as always: the next one strikes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    _late = threading.Timer(LONGEST_S, signal.pthread_kill, (main, signal.SIGINT))
    _late.name = "nbdist-interrupt"
    _late.daemon = True
    _late.start()
