"""What watching costs the main thread: the processor time of each of its parts, a step.

Reading that clock is a system call, so it is read in few steps: in those that are measured
(`tap/sampling.py`), and in as many of the others. The rest is taken to cost what its like does.

A clock within a function does not see what calling it takes, and that is as much again where torch
calls Python. So a few calls are priced where they happen (`Price`), and each counts with it.

What our own threads take beside it is read from the clocks that the system keeps of them.

Main thread; `told` on any.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from statistics import median
from time import thread_time_ns
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

PARTS = ("tap", "hooks", "boundary", "random", "checks", "peers")
_THREADS = {
    "nbdist-records": "records",
    "nbdist-output": "output",
    "nbdist-peers-out": "peers",
    "nbdist-peers-in": "peers",
}
PRICED = 16  # calls of a kind
_AT = {part: at for at, part in enumerate(PARTS)}


class _Kind:
    """Steps that are measured, or those that are not: all, those clocked, and what these cost."""

    __slots__ = ("clocked", "ns", "steps")

    def __init__(self) -> None:
        self.steps = self.clocked = 0
        self.ns = [0] * len(PARTS)

    def us(self, at: int) -> float:
        return self.ns[at] / self.clocked / 1e3 * self.steps if self.clocked else 0.0


class Price:
    """What a kind of call costs beside what is clocked within it: the median of `PRICED`.

    As many before these are forgotten: the first calls of a process are dearer than all others.

    Attributes:
        ns: 0 before any was priced.
        is_wanted: More are to be priced.
    """

    def __init__(self) -> None:
        self.ns, self.is_wanted = 0, True
        self._found: deque[int] = deque(maxlen=PRICED)
        self._left = 2 * PRICED

    def note(self, ns: int) -> None:
        """Take in one more."""
        self._found.append(ns)
        self.ns = int(median(self._found))
        self._left -= 1
        self.is_wanted = self._left > 0


class CostClock:
    """The clock of one rank.

    Attributes:
        is_on: The step that is being made is clocked.
        others: Steps that are not measured. Those that are not clocked either are counted there by
            who makes them: most are such, and to call `end_step` at each costs more than it tells.
        last_ns: When the newest step ended, by `perf_counter_ns`; likewise.
        hook: What torch's call of a hook costs: from one's end to the beginning of the next.
        launch: What torch's call of a collective's Python kernel costs.
        left_ns: When a hook has ended whose next one is to be priced, else 0.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.hook, self.launch = Price(), Price()
        self.left_ns = 0
        self._measured, self.others = _Kind(), _Kind()
        self._told: dict[str, Any] = {}  # of the newest cell that trained, before this one
        self.begin_cell()

    def begin_cell(self) -> None:
        """Know nothing of the cell that begins; one that trains nothing hides none before it."""
        if self._measured.steps or self.others.steps:
            self._told = self.told()
        self.is_on = True
        self._now = [0] * len(PARTS)
        self._measured, self.others = _Kind(), _Kind()
        self._first_ns = self.last_ns = 0  # when the first and the newest step ended
        self._before: dict[str, float] = {}  # seconds of our threads, then
        self._after: dict[str, float] | None = None  # and when the cell ended

    def end_cell(self) -> None:
        """Count no more of what threads do."""
        if self._first_ns:
            self._after = _in_threads()

    def add(self, part: str, ns: int) -> None:
        """Count processor time of the step that is being made, of one of `PARTS`."""
        self._now[_AT[part]] += ns

    def end_step(self, now_ns: int, *, is_measured: bool, clocks_next: bool) -> None:
        """End a step, whose predecessor's end switched the clock on or off.

        Args:
            now_ns: By `perf_counter_ns`.
            is_measured: It was measured.
            clocks_next: Switch the clock on for the step that follows, or off.
        """
        kind = self._measured if is_measured else self.others
        kind.steps += 1
        if not self._first_ns:
            self._first_ns, self._before = now_ns, _in_threads()
        self.last_ns = now_ns
        if self.is_on:
            kind.clocked += 1
            for at, ns in enumerate(self._now):
                # What is mostly called within another part is taken off it at every call.
                kind.ns[at] += max(0, ns)
            self._now = [0] * len(PARTS)
        self.is_on = clocks_next

    def told(self) -> dict[str, Any]:
        """Return what `%dist status --cost` shows of the newest cell that trained, if any.

        Returns:
            `steps`, the mean `step_us` by the wall clock, `measured_share` of the steps, and
            `parts`: microseconds of processor time a step. Empty before the second step.
        """
        measured, others = self._measured, self.others
        steps = measured.steps + others.steps
        if steps < 2:  # the first one's length is not known
            return {} if steps else self._told
        threads = self._after or _in_threads()
        parts = {part: (measured.us(at) + others.us(at)) / steps for part, at in _AT.items()}
        for part in dict.fromkeys(_THREADS.values()):
            spent_s = threads.get(part, 0.0) - self._before.get(part, 0.0)
            parts[part] = parts.get(part, 0.0) + max(0.0, spent_s) * 1e6 / (steps - 1)
        if not parts["peers"]:
            del parts["peers"]  # it was not asked for
        return {
            "steps": steps,
            "step_us": (self.last_ns - self._first_ns) / (steps - 1) / 1e3,
            "measured_share": measured.steps / steps,
            "parts": parts,
        }


def _in_threads() -> dict[str, float]:
    """Return the seconds that our threads have computed so far, by part; not on every system."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return {}
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if (part := _THREADS.get(thread.name)) is not None and thread.ident is not None:
            spent_s = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            found[part] = found.get(part, 0.0) + spent_s
    return found


clock = CostClock()


def clocked(part: str, *, within: str | None = None) -> Callable[[F], F]:
    """Have the processor time of a function count as that of `part`, in steps that are clocked.

    One of these within another counts as both, but not as what it is said to be `within`.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def call(*args: Any) -> Any:
            if not clock.is_on:
                return function(*args)
            began_ns = thread_time_ns()
            try:
                return function(*args)
            finally:
                spent_ns = thread_time_ns() - began_ns
                clock.add(part, spent_ns)
                if within is not None:
                    clock.add(within, -spent_ns)

        return cast(F, call)

    return decorate
