"""Which steps are told collective by collective: arithmetic on step numbers and rates.

A step is told when its number is a multiple of the *stride*, a power of two. It begins at 1 with
each cell, doubles while telling costs too much, and never falls: ranks that double at different
moments still tell the multiples of the largest stride, all of them.

What is told costs a rank some 25 us a collective (`tests/benchmarks/bench_tap`), the rest a third
of it. So `CHEAP_ROWS` a second are aimed at, 1 % of a core, where steps are so short that
`ENOUGH_STEPS` a second remain; `MOST_ROWS` a second are never exceeded for long.
"""

CHEAP_ROWS = 500
ENOUGH_STEPS = 4
MOST_ROWS = 4000
_SPAN_NS = 250_000_000  # rates are taken over so long, or until so many rows that they are clear


class Stride:
    """The stride of one rank in one cell."""

    __slots__ = ("_began_ns", "_rows", "_steps", "every")

    def __init__(self) -> None:
        self.every = 1
        self._began_ns: int | None = None
        self._rows = self._steps = 0

    def tells(self, step: int) -> bool:
        """Return whether a step is told."""
        return step % self.every == 0

    def told(self, now_ns: int, rows: int) -> None:
        """Count a step that was told, with so many rows; the stride doubles when that is much."""
        if self._began_ns is None:  # the first step of a cell is longer than others
            self._began_ns = now_ns
            return
        self._rows += rows
        self._steps += 1
        seconds = max(1, now_ns - self._began_ns) / 1e9
        is_clear = self._steps >= 4 and self._rows >= CHEAP_ROWS // 4
        if not is_clear and seconds < _SPAN_NS / 1e9:
            return
        rate = self._rows / seconds
        has_enough = self._steps / seconds >= 2 * ENOUGH_STEPS
        if rate > MOST_ROWS or (rate > CHEAP_ROWS and has_enough):
            self.every *= 2
        self._began_ns, self._rows, self._steps = now_ns, 0, 0
