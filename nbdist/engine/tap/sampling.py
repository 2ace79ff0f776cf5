"""Which steps are told collective by collective: arithmetic on step numbers and rates.

A step is told when its number is a multiple of the *stride*, a power of two. It begins at 1 with
each cell, doubles while telling costs too much, and never falls: ranks that double at different
moments still tell the multiples of the largest stride, all of them.

What is told costs a rank some 50 us a collective beyond the rest (`tests/benchmarks/bench_tap`),
for gloo's thread must then take the GIL. Nobody looks at more than `MOST_STEPS` a second, and
`ENOUGH_STEPS` do where they are told at a price, beyond `CHEAP_ROWS` a second. `MOST_ROWS` a second
are never exceeded for long.
"""

MOST_STEPS = 12
ENOUGH_STEPS = 4
CHEAP_ROWS = 500
MOST_ROWS = 4000
# Rates are taken over so many steps: the first of each cell are all told. Rows over so long, too.
_CLEAR_STEPS = 16
_CLEAR_ROWS = CHEAP_ROWS // 4
_SPAN_S = 0.25


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
        rows_s, steps_s = self._rows / seconds, self._steps / seconds
        is_clear = self._steps >= _CLEAR_STEPS
        has_rows = seconds >= _SPAN_S or (self._steps >= 4 and self._rows >= _CLEAR_ROWS)
        most_steps = MOST_STEPS if rows_s <= CHEAP_ROWS else 2 * ENOUGH_STEPS
        if (is_clear and steps_s >= most_steps) or (has_rows and rows_s > MOST_ROWS):
            self.every *= 2
        elif not is_clear:
            return
        self._began_ns, self._rows, self._steps = now_ns, 0, 0
