"""Where loops over loaders go on, when a cell is run again after a fault.

Each boundary notes every loader's position, and a fault puts it back there. Loaders are told apart
by the order in which the cell makes them: run again, it makes others, which go on in their place.

Main thread.
"""

import weakref
from collections import deque
from dataclasses import dataclass, field, replace

from nbdist.engine import boundary
from nbdist.engine.data import standing
from nbdist.engine.data.sampler import Spec
from nbdist.engine.data.standing import Standing
from nbdist.engine.data.trail import Commit, Position, Trail

_Mark = list[tuple[Trail, Commit]]
_Planned = tuple[Spec, list[Position | None]]


@dataclass(frozen=True, slots=True)
class _Again:
    """How a cell is run again, also when others have run since.

    `made` are the loaders that the cell makes, `live` those that were there before it, each with
    where its passes go on.
    """

    number: int
    goes_on: bool
    has_stepped: bool
    made: list[_Planned]
    live: list[tuple["weakref.ref[Standing]", list[Position | None], Commit]]
    began: boundary.Mark | None


@dataclass
class _Cell:
    """The loaders of the cell that runs, or has just ended. `number` counts the session's cells."""

    number: int = 0
    made: list[tuple[Spec, Trail]] = field(default_factory=list)
    inherited: list[_Planned] = field(default_factory=list)
    # A loader that only its loop held would go with the exception, and its position with it.
    newest: "deque[Standing]" = field(default_factory=lambda: deque(maxlen=16))
    taken_over: _Again | None = None  # in a newcomer, which has not run it
    repeats: _Again | None = None  # as which this cell was begun

    def add(self, new: Standing) -> None:
        """Note a loader that this cell makes; run again, the cell makes it go on."""
        spec, nth = new.batches.spec(), len(self.made)
        self.made.append((spec, new.trail))
        self.newest.append(new)
        if nth < len(self.inherited) and self.inherited[nth][0] == spec:
            new.plan.extend(self.inherited[nth][1])

    def again(self) -> _Again:
        """Return how it would be run again."""
        if self.taken_over is not None:
            return self.taken_over
        if self.repeats is not None and not boundary.has_stepped():
            # It came to nothing: what held before it still does.
            return replace(self.repeats, number=self.number)
        return _Again(
            self.number,
            boundary.goes_on(),
            boundary.has_stepped(),
            [(spec, trail.plan()) for spec, trail in self.made],
            [(weakref.ref(one), one.trail.plan(), one.trail.began) for one in standing.live()],
            boundary.here().cell_began,
        )


def begin_cell(number: int, *, failed: int | None, is_retry: bool) -> str | None:
    """Let loops begin as always, or, in a cell that is run again, go on where they stood.

    They go on when what was trained goes on: when the optimizers that stepped were there before
    the cell that failed. Those that it makes anew start over, and so do the loops.

    Args:
        number: The cell's, in the session.
        failed: The cell that failed last, and has not gone well since. A rank on which it ended
            well learns so that it failed elsewhere. None: there is none.
        is_retry: The cell is that one, run again.

    Returns:
        What was decided, for people, where something was.
    """
    global _cell, _again
    standing.forget_newest()
    if _again is None or _again.number != failed:
        _again = _cell.again() if _cell.number == failed else None
    again = _again if is_retry else None
    _cell = _Cell(number, repeats=again)
    for live in standing.live():
        live.plan.clear()
    line = None if again is None else _prepare(again)
    for live in standing.live():
        live.begin_cell(number)
    return line


def _prepare(again: _Again) -> str | None:
    """Let every loader stand where the cell goes on; returns where, for people."""
    if not again.goes_on:
        boundary.start_over(again.began)
        for where, _, began in again.live:
            if (live := where()) is not None:
                live.go_back(began)
        if not again.has_stepped:
            return None
        return "The cell starts over: it makes its optimizer anew, and loops begin where they did."
    _cell.inherited = again.made
    for where, plan, _ in again.live:
        if (live := where()) is not None:
            live.plan.extend(plan)
    plans = [*(plan for _, plan in again.made), *(plan for _, plan, _ in again.live)]
    ends = {plan[-1] for plan in plans if plan}
    places = sorted(f"sample {p.consumed:,} of epoch {p.epoch}" for p in ends if p is not None)
    return f"The cell goes on: its loader stands at {', '.join(places)}." if places else None


_Handed = tuple[
    int, bool, bool, list[_Planned], list[tuple[Standing, list[Position | None], Commit]]
]


def hand_over() -> list[_Handed]:
    """Return what a newcomer must know to run a cell again: the last one, or one that failed."""
    return [
        (
            again.number,
            again.goes_on,
            again.has_stepped,
            again.made,
            [(one, plan, began) for where, plan, began in again.live if (one := where())],
        )
        for again in (_cell.again(), _again)
        if again is not None
    ]


def take_over(handed: list[_Handed]) -> None:
    """Know, in a newcomer, what `hand_over` told on the rank that it was cloned from."""
    global _again
    last, *failed = [
        # The random numbers with which the cell began were the other rank's.
        _Again(
            number, goes_on, has_stepped, made, [(weakref.ref(o), p, b) for o, p, b in live], None
        )
        for number, goes_on, has_stepped, made, live in handed
    ]
    _cell.number, _cell.taken_over = last.number, last
    _again = failed[0] if failed else None


def cell_number() -> int:
    """Return the number of the cell that runs, or has just ended."""
    return _cell.number


def add(new: Standing) -> None:
    """Note a loader that the cell makes."""
    _cell.add(new)


def weigh_newest() -> None:
    """Note that the newest batch's gradient is weighed by its part: `layout.step` does."""
    if (newest := standing.newest()) is not None:
        newest.heed.weigh()


def count_copied() -> None:
    """Note that this rank has copied the step that it had lost: its batches are trained on."""
    for live in standing.live():
        live.trail.count_copied()


def _take() -> _Mark:
    """Note every loader's position: an optimizer has stepped on what was given."""
    if (newest := standing.newest()) is not None:
        newest.heed.step()
    return [(live.trail, live.commit()) for live in standing.live()]


def _restore(mark: _Mark) -> None:
    """Put every loader back where it stood at a boundary."""
    commits = {id(trail): commit for trail, commit in mark}
    for live in standing.live():
        commit = commits.get(id(live.trail))
        if commit is not None:
            live.go_back(commit)


_cell = _Cell()
_again: _Again | None = None
boundary.also(_take, _restore)
