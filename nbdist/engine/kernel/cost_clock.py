"""Measure the overhead of monitoring: the main thread's processor time of each part, per step.

Reading that clock is a system call, so it is read in few steps: in those that are measured
(`tap/sampling.py`), and in as many of the others. The others are assumed to cost the same.

A clock within a function does not see the call itself, which costs as much again where torch
calls Python. So a few calls are priced where they happen (`Price`), and each counts with it.

The time of our own threads is read from the system's clocks of them.

Main thread; `summary` on any.
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

PARTS = ("tap", "hooks", "boundary", "random", "checks", "peers", "guard")
_THREADS = {
    "nbdist-records": "records",
    "nbdist-output": "output",
    "nbdist-peers-out": "peers",
    "nbdist-peers-in": "peers",
}
PRICED = 16  # calls of a kind
_AT = {part: at for at, part in enumerate(PARTS)}


class _Kind:
    """Measured steps, or the others: their number, how many were clocked, and their cost."""

    __slots__ = ("clocked", "ns", "steps")

    def __init__(self) -> None:
        self.steps = self.clocked = 0
        self.ns = [0] * len(PARTS)

    def us(self, at: int) -> float:
        return self.ns[at] / self.clocked / 1e3 * self.steps if self.clocked else 0.0


class Price:
    """The cost of a kind of call beside what is clocked within it: the median of `PRICED`.

    As many calls before these are ignored: the first ones of a process are the slowest.

    Attributes:
        ns: 0 before any was priced.
        is_wanted: More are to be priced.
    """

    def __init__(self) -> None:
        self.ns, self.is_wanted = 0, True
        self._found: deque[int] = deque(maxlen=PRICED)
        self._left = 2 * PRICED

    def note(self, ns: int) -> None:
        """Add a sample."""
        self._found.append(ns)
        self.ns = int(median(self._found))
        self._left -= 1
        self.is_wanted = self._left > 0


class CostClock:
    """The clock of one rank.

    Attributes:
        is_on: The step that is being made is clocked.
        others: Steps that are not measured. Those that are not clocked either are counted there by
            their maker: most are such, and calling `end_step` at each would cost too much.
        last_ns: When the newest step ended, by `perf_counter_ns`; likewise.
        hook: The cost of torch's call of a hook: from one's end to the beginning of the next.
        launch: The cost of torch's call of a collective's Python kernel.
        left_ns: When a hook ended whose successor is to be priced, otherwise 0.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.hook, self.launch = Price(), Price()
        self.left_ns = 0
        self._measured, self.others = _Kind(), _Kind()
        self._summary: dict[str, Any] = {}  # of the newest cell that trained, before this one
        self.begin_cell()

    def begin_cell(self) -> None:
        """Begin a cell; a cell that trains nothing keeps the summary of the one before."""
        if self._measured.steps or self.others.steps:
            self._summary = self.summary()
        self.is_on = True
        self._now = [0] * len(PARTS)
        self._measured, self.others = _Kind(), _Kind()
        self._first_ns = self.last_ns = 0  # when the first and the newest step ended
        self._before: dict[str, float] = {}  # seconds of our threads, then
        self._after: dict[str, float] | None = None  # and when the cell ended

    def end_cell(self) -> None:
        """Stop counting the time of threads."""
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
                # A part that is mostly called within another one is subtracted from it at every
                # call.
                kind.ns[at] += max(0, ns)
            self._now = [0] * len(PARTS)
        self.is_on = clocks_next

    def summary(self) -> dict[str, Any]:
        """Return the costs of the newest cell that trained, for `%dist status --cost`.

        Returns:
            `steps`, the mean `step_us` by the wall clock, `measured_share` of the steps, and
            `parts`: microseconds of processor time a step. Empty before the second step.
        """
        measured, others = self._measured, self.others
        steps = measured.steps + others.steps
        if steps < 2:  # the first one's length is not known
            return {} if steps else self._summary
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
    """Return the processor seconds of our threads so far, by part; not on every system."""
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
    """Count a function's processor time as that of `part`, in clocked steps.

    A nested function counts for both parts, except for the part named by `within`.
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
