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

_late: threading.Timer | None = None  # interrupts again, when the step has not ended by then


def begin() -> None:
    """A step begins."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _wait)


def end() -> None:
    """The step is whole.

    Raises:
        KeyboardInterrupt: One has come meanwhile.
    """
    global _late
    if signal.getsignal(signal.SIGINT) is _wait:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _late is not None:
        late, _late = _late, None
        if late.is_alive():
            late.cancel()
            raise KeyboardInterrupt


def _wait(*_: Any) -> None:
    global _late
    # From here on as always: the next one strikes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    _late = threading.Timer(LONGEST_S, signal.pthread_kill, (main, signal.SIGINT))
    _late.name = "nbdist-interrupt"
    _late.daemon = True
    _late.start()
