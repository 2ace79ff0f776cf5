"""Remember how far the loops over one loader came in a cell, and where they go on. Pure: no torch.

A *pass* is one `for` over a loader. What a pass was given counts once an optimizer has stepped on
it: at each boundary (the end of an optimizer step) the trail is committed. After a fault the
position goes back to what was committed; when the cell is run again, its passes are matched with
those of the run that failed, one by one:

- a pass that had trained and was over is done: the loop gets nothing;
- the one in whose midst the last boundary lay goes on there, and ends as usual;
- a mere look (no step was made on it) begins where it had begun;
- the next one, where all were over at the last boundary, begins where it would have.

A pass is over when its loop was given all, when the loader's next pass begins, or when one of
another loader begins and its loop is left. So a boundary in one loop says of the others that are
over that they are done.

Loops may lie within each other. A boundary in an inner loop lies in the midst of the outer one's
batch: the outer loader stands before it, gives it once more when the cell is run again, and of the
inner loops those of that batch alone are planned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_PASSES = 10_000  # of one loader in one cell; beyond, all go on from the committed position


class Position(NamedTuple):
    """Where a loader stands: samples `consumed` of an epoch, by all ranks together."""

    epoch: int
    consumed: int


@dataclass(slots=True, eq=False)
class Draws:
    """The random numbers with which the batch after a boundary was first asked for.

    What a loop draws between an optimizer's step and its next batch belongs to the step, and a loop
    that goes on with that batch does not draw it again. `state` is None until then; a new rank,
    whose random numbers are others, gets none. `is_again` says of a batch that it was given before
    the boundary: what is drawn after it is drawn as if it had not been given once more.
    """

    state: Any = None
    is_again: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Draws, ()


class Commit(NamedTuple):
    """A loader at a boundary.

    `given` counts the batches of the running pass, `passes` those begun in `cell` so far;
    `is_resumed` says that the next pass goes on from here, and is no new epoch. `is_over` says that
    the last of the passes is over. `served` counts the batches of all passes, for the journal.
    """

    position: Position
    given: int
    is_resumed: bool
    passes: int
    cell: int
    is_over: bool
    draws: Draws
    served: int = 0

    @property
    def continues_at(self) -> Position:
        """Where the running pass goes on, or, when it is over, the next one begins."""
        if self.is_resumed or not self.is_over:
            return self.position
        return Position(self.position.epoch + (self.given > 1), 0)


@dataclass(slots=True)
class _Pass:
    """A loop; `within` is the log of the loop around it, and the count of batches of that one."""

    start: Position
    has_trained: bool = False
    within: "tuple[PassLog, int] | None" = None


class PassLog:
    """The passes of one cell over one loader."""

    def __init__(self, position: Position, cell: int) -> None:
        self._passes: list[_Pass] = []
        self._had_trained = False  # the last pass of the cell before
        self._cell = cell
        self._is_alive: Callable[[], object] = _is_over
        self._moved = False  # the running pass was given a batch since the last boundary
        self._is_ended = False  # the newest pass is over
        self._count = self._begun = 0  # batches of all passes, and before the newest
        self._is_beside = False  # another loop was given batches while one over this went on
        self._asked: Any = None  # the random numbers with which the newest batch was asked for
        self._is_within = False  # the last boundary lay in the midst of its batch
        self._has_inner = False  # a pass lay in the body of another loader's loop
        self._turn = 0  # of the last boundary, as of `commit`
        # Whether a batch was trained on in several turns: where the next of them begins is not
        # known, and a loop that is run again continues with its next batch.
        self.is_around_steps = False
        self.began = Commit(position, 0, False, 0, cell, False, Draws())
        self.committed = self.began

    @property
    def has_trained(self) -> bool:
        """Whether an optimizer has stepped on what the newest pass was given."""
        return self._passes[-1].has_trained if self._passes else self._had_trained

    def begin_cell(
        self, position: Position, given: int, is_resumed: bool, cell: int, served: int = 0
    ) -> None:
        """Forget the passes of the cell before."""
        self._had_trained = self.has_trained
        self._passes, self._cell = [], cell
        self.is_around_steps = False
        self._is_alive, self._moved = _is_over, False
        self._is_ended = self._is_within = self._is_beside = False
        self.began = Commit(position, given, is_resumed, 0, cell, False, Draws(), served)
        self.committed = self.began

    def __getstate__(self) -> dict[str, object]:
        # A loader travels to a replacement rank; the loop that runs here does not.
        return {**self.__dict__, "_is_alive": _is_over}

    def begin_pass(
        self,
        start: Position,
        is_alive: Callable[[], object],
        around: "PassLog | None" = None,
    ) -> None:
        """Note that a loop begins.

        Args:
            start: Where.
            is_alive: Tells later, by a true value, that the loop goes on: it has not ended, and
                was not left by `break`.
            around: The innermost loop over another loader in whose body it begins.
        """
        self._add(_Pass(start, within=self._body_of(around)))
        self._is_alive, self._moved = is_alive, False

    def pass_over(self, start: Position, around: "PassLog | None" = None) -> None:
        """Note that a loop gets nothing, for it was done when this cell ran before."""
        self._add(_Pass(start, has_trained=True, within=self._body_of(around)))
        self._is_alive, self._moved, self._is_ended = _is_over, False, True

    def ask(self, random_numbers: Callable[[], Any]) -> None:
        """Note the random numbers with which the running loop asks for its next batch."""
        draws = self.committed.draws
        if draws.state is None:
            draws.state = self._asked = random_numbers()
        elif self._is_within:
            self._asked = random_numbers()
        self._end_batch()

    def give(self) -> None:
        """Note that the running loop gets a batch."""
        self._moved = True
        self._count += 1

    def go_beside(self, other: "PassLog") -> None:
        """Note that another loop gets a batch while this one goes on: they are no inner loops.

        But for a loop in this one's body. `zip` has such loops, and an iterator that is kept.
        """
        if self.is_running and not self.is_around(other):
            self._is_beside = True
            if self._passes:
                self._passes[-1].within = None

    def _body_of(self, around: "PassLog | None") -> "tuple[PassLog, int] | None":
        return None if around is None or self._is_beside else (around, around._count)

    def end_pass(self) -> None:
        """Note that the running loop has come to its end."""
        self._end_batch()
        self._is_ended = True

    def _end_batch(self) -> None:
        """Note that the body of the running loop is done with its batch."""
        if self._is_within and self._passes:
            self._passes[-1].has_trained = True

    @property
    def is_running(self) -> bool:
        """Whether the newest loop goes on."""
        return not self._is_ended and bool(self._is_alive())

    @property
    def is_in_body(self) -> bool:
        """Whether the newest loop goes on and has been given a batch."""
        return self._count > self._begun and self.is_running

    def is_around(self, other: "PassLog") -> bool:
        """Return whether another log's loop runs in the body of this one's, on its newest batch."""
        within = other._passes[-1].within if other._passes else None
        if within is None or not other.is_running:
            return False
        log, count = within
        return (log is self and count == self._count) or self.is_around(log)

    def end_left(self) -> None:
        """Note that a loop over another loader begins: one that is left by now is over."""
        self._is_ended = self._is_ended or not self._is_alive()

    def count_copied(self) -> None:
        """Note that what the last pass was given has been trained on, by another rank.

        The fault has ended the pass: it cannot be told by its being alive.
        """
        if self._moved and not self._is_ended and self._passes:
            self._passes[-1].has_trained = True
            self._is_alive = _continues

    def _add(self, one: _Pass) -> None:
        self._is_ended = False
        self._begun = self._count
        self._has_inner = self._has_inner or one.within is not None
        if len(self._passes) < MAX_PASSES:
            self._passes.append(one)

    def commit(
        self,
        position: Position,
        given: int,
        is_resumed: bool,
        served: int = 0,
        turn: int = 0,
        *,
        is_within: bool = False,
    ) -> Commit:
        """Note a boundary; what the running pass was given has been trained on.

        Args:
            position: Where the loader stands.
            given: Batches of the running pass.
            is_resumed: As in `Commit`.
            served: As in `Commit`.
            turn: In which the boundary is: two optimizers that step one after the other share it.
            is_within: A loop over another loader goes on in the body of the running one: all else
                is as before the newest batch.
        """
        self._is_within = is_within
        if self._has_inner:  # loops in the body of a batch that is done are not run again
            self._passes = [one for one in self._passes if not one.within or _is_at(*one.within)]
            self._has_inner = any(one.within for one in self._passes)
        is_again = turn != self._turn and not self._moved and not self._is_beside
        if is_again and self._passes and self.is_running:
            self.is_around_steps |= self._passes[-1].has_trained
        self._turn = turn
        if self._moved and not is_within:
            if self._is_alive() and self._passes:
                self._passes[-1].has_trained = True
            self._moved = False
        *before, _, served_before = self.committed
        here = position, given, is_resumed, len(self._passes), self._cell, self._is_ended
        if here != tuple(before):
            draws = Draws(self._asked, is_again=True) if is_within else Draws()
            self.committed = Commit(*here, draws, served)
        elif served != served_before:
            self.committed = self.committed._replace(served=served)
        return self.committed

    def forget_after(self, commit: Commit) -> None:
        """Forget what passes were given since a boundary of this cell: the fault has lost it."""
        if commit.cell == self._cell:
            del self._passes[commit.passes :]
            self._moved, self._is_ended = False, commit.is_over

    def goes_back_to(self, commit: Commit) -> bool:
        """Return whether a fault takes the loader back to `commit`.

        Not beyond the begin of a cell that took nothing from it: what has been trained on it since
        is another cell's, and whole.
        """
        return commit.cell == self._cell or bool(self._passes)

    def plan(self) -> list[Position | None]:
        """Return where the passes of this cell begin when it is run again; None: it is done.

        Passes beyond the plan begin as usual.
        """
        here = self.committed
        if here.cell != self._cell:  # rolled back beyond the cell's beginning
            return [here.continues_at] if self._passes else []
        passes = self._passes[: here.passes]
        if not any(one.has_trained for one in passes):
            return []
        if len(self._passes) == MAX_PASSES:
            return [here.continues_at]
        *done, last = passes
        if here.is_over and (last.has_trained or here.given != 1):
            done, at = passes, here.continues_at
        else:  # in its midst, or a look at one batch, which is no epoch
            at = here.position if last.has_trained else last.start
        return [*(None if one.has_trained else one.start for one in done), at]


def _is_at(log: PassLog, count: int) -> bool:
    """Return whether a loop goes on with the batch of that count."""
    return log._count == count and log.is_running


def _continues() -> bool:
    """Stand for a loop that ran until a fault ended it."""
    return True


def _is_over() -> bool:
    """Stand for a loop that does not run."""
    return False
