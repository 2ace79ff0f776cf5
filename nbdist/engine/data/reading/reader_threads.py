"""The threads of a pass that read groups ahead, and mix what was read.

Threads: `ReaderThreads` is used by the loop's. Each thread is called `nbdist-read-N`, and ends with
the pass; one that a store keeps waiting ends when its read does.
"""

import itertools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from nbdist.shared import background

T = TypeVar("T")
MOST = 4
LEAST = 2  # one waits for the disk while the other decodes
_URGENT, _IN_TURN, _LAST = range(3)

_Action = tuple[Future[Any], Callable[[], Any]]


def own_cores() -> float:
    """Return how many cores this rank may use: its share where several are on the machine."""
    return background.cores() / max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def wanted(is_far: bool, cores: float) -> int:
    """Return how many threads read.

    Args:
        is_far: Reads wait for a store more than they take a core.
        cores: Of this rank. Threads beyond them take turns, and each throws the other's samples
            out of the caches: decoding takes a tenth more.
    """
    return MOST if is_far else min(MOST, max(LEAST, int(cores)))


class ReaderThreads:
    """Threads that do what they are given, in order; daemons, for none may keep a rank alive."""

    def __init__(self, threads: int) -> None:
        # By urgency, and by the order of asking.
        self._todo: queue.PriorityQueue[tuple[int, int, _Action | None]] = queue.PriorityQueue()
        self._asked = itertools.count()
        self.threads: list[threading.Thread] = []
        for _ in range(threads):
            self.start_thread()

    def start_thread(self) -> None:
        """Have one more."""
        name = f"nbdist-read-{len(self.threads)}"
        thread = threading.Thread(target=_work, args=(self._todo,), name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def submit(self, action: Callable[[], T], *, is_urgent: bool = False) -> "Future[T]":
        """Have a thread do something, before what waits if it is urgent."""
        future: Future[T] = Future()
        urgency = _URGENT if is_urgent else _IN_TURN
        self._todo.put((urgency, next(self._asked), (future, action)))
        return future

    def close(self) -> None:
        """Let each thread end after what it does; nothing else is begun."""
        while True:
            try:
                *_, one = self._todo.get_nowait()
            except queue.Empty:
                break
            if one is not None:
                one[0].cancel()
        for _ in self.threads:
            self._todo.put((_LAST, next(self._asked), None))


def _work(todo: "queue.PriorityQueue[tuple[int, int, _Action | None]]") -> None:
    while (one := todo.get()[2]) is not None:
        future, action = one
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)
        del one, future, action  # what was read is the feed's alone
