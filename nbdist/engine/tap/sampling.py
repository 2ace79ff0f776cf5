"""Choose the steps that are measured, and those whose collectives are sampled; pure.

Steps are chosen by their number alone. The numbers are spread by the golden ratio (Fibonacci
hashing, Knuth, The Art of Computer Programming, 6.4), so that what a loop does every so many steps,
an evaluation, is neither always met nor always missed. Those chosen at a larger *stride* are among
those chosen at a smaller one: ranks that double at different moments still share the steps of the
largest stride, all of them. A stride begins at 1 with each cell, grows by powers of two and never
falls.

*Measured* steps know what they are made of. In the others losses, times, counts and bytes are as
exact, and no clock is read for their parts. At most `MOST_MEASURED` a second are measured, and
at least half as many where there are. One costs 0.1 to 0.4 ms more: less than 0.3 % of the time.

*Sampled* steps are measured, and each of their collectives is reported. That costs a rank 50 us a
collective more (`tests/benchmarks/bench_tap`), for gloo's thread must then take the GIL. No one
looks at more than `MOST_STEPS` a second, and `ENOUGH_STEPS` do where sampling costs,
beyond `CHEAP_ROWS` a second. `MOST_ROWS` a second are never exceeded for long.
"""

MOST_STEPS = 12
ENOUGH_STEPS = 4
CHEAP_ROWS = 500
MOST_ROWS = 4000
MOST_MEASURED = 8.0  # a second
FIRST_STEPS = 64  # of a cell, which are all measured: a rank that is slow from the first is named
# Rates are taken over so many steps: the first of each cell are all sampled. Rows over so long,
# too.
_CLEAR_STEPS = 16
_CLEAR_ROWS = CHEAP_ROWS // 4
_SPAN_S = 0.25
_NUMBERS = 1 << 32
_GOLDEN = 2_654_435_769  # 2**32 divided by the golden ratio


def is_chosen(step: int, stride: int) -> bool:
    """Return whether a step is one of those chosen, one in `stride`, a power of two."""
    return step * _GOLDEN % _NUMBERS < _NUMBERS // stride


class Measuring:
    """Chooses the steps of one cell that this rank measures."""

    __slots__ = ("_began_ns", "_began_step", "_below", "_count", "every")

    def __init__(self) -> None:
        self.every = 1
        self._below = _NUMBERS
        self._began_ns: int | None = None
        self._began_step = self._count = 0

    def measures(self, step: int) -> bool:
        """Return whether a step is measured: `is_chosen`, which is asked at every step."""
        return step * _GOLDEN % _NUMBERS < self._below

    def measured(self, step: int, now_ns: int) -> None:
        """Count a measured step, which ends now; the stride grows when there are too many."""
        if self._began_ns is None:  # the first step of a cell is longer than others
            self._began_ns, self._began_step = now_ns, step
            return
        self._count += 1
        if self._count < _CLEAR_STEPS or step < FIRST_STEPS:
            return
        steps_s = (step - self._began_step) * 1e9 / max(1, now_ns - self._began_ns)
        while steps_s > MOST_MEASURED * self.every:
            self.every *= 2
        self._below = _NUMBERS // self.every
        self._began_ns, self._began_step, self._count = now_ns, step, 0


class StepSampling:
    """Chooses the steps of one cell whose collectives this rank reports."""

    __slots__ = ("_began_ns", "_rows", "_steps", "every")

    def __init__(self) -> None:
        self.every = 1
        self._began_ns: int | None = None
        self._rows = self._steps = 0

    def samples(self, step: int) -> bool:
        """Return whether a step is sampled."""
        return is_chosen(step, self.every)

    def sampled(self, now_ns: int, rows: int) -> None:
        """Count a sampled step and its rows; the stride doubles when there are too many."""
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
