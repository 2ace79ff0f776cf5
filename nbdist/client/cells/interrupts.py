"""Count interrupts, or hold them, instead of raising them, while ranks must be left settled.

A KeyboardInterrupt can come out of any line. While the group is formed again, or a
cell's pictures are put in place, it would leave half of the work done. While a cell runs, an
interrupt is therefore a number that the cell's loop looks at, every 100 ms or sooner.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """A context manager; `count` is the number of interrupts since.

    On any other thread than the main one only `ask` and `here.interrupt_to_stop` count: Python
    delivers signals to the main one.

    Attributes:
        count: How often all that runs was interrupted.
        ranks: Ranks of a cell that are to be interrupted alone.
        is_to_stop: The ranks will be stopped, so that none of them continues.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        self.count = 0
        self.ranks: set[int] = set()
        self.is_to_stop = False
        self._before: Any = None
        self._is_main = threading.current_thread() is threading.main_thread()

    def ask(self, rank: int | None = None) -> bool:
        """Interrupt what this counts for, or one rank of it; return False where it is over.

        Any thread. It reaches nothing that begins later, however late it is called.
        """
        if self not in here.entered:
            return False
        if rank is None:
            self.count += 1
        else:
            self.ranks.add(rank)
        return True

    def __enter__(self) -> "Interrupts":
        if self._is_main:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        here.entered.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        here.entered.remove(self)
        if self._is_main:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Nothing but counting: whatever lock the interrupted line holds is not ours to take.
        self.count += 1


class Counting:
    """The `Interrupts` that count now, in a kernel.

    Attributes:
        entered: Those entered and not left, of all threads.
    """

    def __init__(self) -> None:
        self.entered: list[Interrupts] = []

    def interrupt_to_stop(self) -> None:
        """Interrupt all of it, for the ranks will be stopped. Any thread."""
        for interrupts in list(self.entered):
            interrupts.is_to_stop = True
            interrupts.count += 1


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let an interrupt that comes during a block arrive at its end.

    For short work that, half done, would leave something that no one owns. Where the block
    raises, only that is raised.
    """
    with Interrupts() as interrupts:
        yield
    if interrupts.count and threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGINT)  # to whoever handles it now, as if it came now


here = Counting()
