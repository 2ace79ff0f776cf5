"""Where a loader stands: the position that its loops were given, and what comes next.

Workers fetch ahead, so the position counts what a loop was given, not what was fetched.

Threads: the loop's. The position is kept by the iterator that the loop drives.
"""

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.data.order import weighting
from nbdist.engine.data.order.sampler import Batches
from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.data.order.weighting import Heed
from nbdist.engine.data.position.account import Account
from nbdist.engine.data.position.left_out import LeftOut
from nbdist.engine.data.position.passes import Commit, Draws, PassLog, Position
from nbdist.engine.steps import step_state
from nbdist.shared.wire import CellStart

_log = logging.getLogger("nbdist.data")


class LoaderPosition:
    """One loader's: what an interrupted training needs, without the loader and its data."""

    def __init__(self, batches: Batches, cell: int, prompt: int = 0) -> None:
        """Stand at the begin of the first epoch.

        Args:
            batches: Of the loader; epoch and position are set there before each pass.
            cell: The number of the cell that makes the loader, as the session counts them.
            prompt: The number that its errors name; 0 where it is no cell of a notebook.
        """
        self.batches = batches
        self.number = here.next_number()  # in the order of making
        self.consumed = 0  # samples of this epoch that the loop was given, over all ranks
        self.newest = range(0)  # the positions of the newest batch, over all ranks
        self.part = range(0)  # of it, this rank's; empty where some of it could not be loaded
        self.heed = Heed()
        self.left_out = LeftOut()
        self.plan: deque[Position | None] = deque()  # of a cell that is run again
        self.draws: Draws | None = None  # of the last pass of the plan
        self._to_draw: Draws | None = None  # with which the next batch is asked for
        self._draws_after: Any = None  # the random numbers that follow it, where it is given again
        self._given = 0  # batches of the running loop that it was given
        self._is_resumed = False
        self._before = Position(0, 0), 0, False, 0  # as before the newest batch
        self._is_replayed = False  # the running pass was in the journal when its cell failed
        self.holder: Callable[[], object] = _nobody  # the loader; what a fault needs outlives it
        self._loop: Callable[[], object] = _nobody  # the newest, as long as anything holds it
        self.account = Account(cell, batches.spec(), prompt=prompt or cell, **batches.about())
        self.trail = PassLog(self._position(), cell)
        here.add(self)
        here.take_pending(self)

    def __getstate__(self) -> dict[str, Any]:
        # Its loader says so itself when it arrives; a loop does not travel.
        return {**self.__dict__, "holder": _nobody, "_loop": _nobody}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In a replacement: what it makes is newer than this one, as on its peers, and from now on a
        # retried cell makes its loader go on.
        here.number_after(self.number)
        here.add(self)

    @property
    def epoch(self) -> int:
        """The epoch that runs, or that the next pass begins or goes on with."""
        for ahead, planned in enumerate(self.plan):
            if planned is not None:
                return max(0, planned.epoch - ahead)
        return self.continues_at.epoch

    @property
    def continues_at(self) -> Position:
        """Where the running loop goes on, or the next one begins: at its start, after one left.

        In a loop that runs in its body it goes on with the newest batch once more.
        """
        if self._is_around_another():
            return self._before[0]
        if self._is_resumed or self._loop() is not None:
            return self._position()
        return Position(self.batches.epoch + (self._given > 1), 0)

    @property
    def trains_on_at(self) -> Position:
        """Where the next pass begins that gets anything."""
        return next((one for one in self.plan if one is not None), self._position())

    def batches_left(self) -> int:
        """Return how many batches are left of this epoch."""
        return len(self.batches.ends(self.consumed))

    def next_pass(self) -> bool:
        """Stand where the next pass begins; return False if it is done and gets nothing."""
        here.before_pass()
        self._loop = _nobody
        is_look = self._given == 1 and not self._is_resumed and not self._is_replayed
        if is_look and not self.trail.has_trained:
            self.account.go_back(self.account.served - 1)
        self._is_replayed = False
        if self.plan:
            planned = self.plan.popleft()
            self._to_draw = self.draws if not self.plan else None
            self._is_replayed = bool(self.plan)
            if planned is None:
                if len(self.plan) == 1 and (at := self.plan[0]) is not None:
                    self.stand_at(at)  # also for who asks before the next pass begins
                self.trail.pass_over(self._position(), self._around())
                here.passed_over()
                if [one.consumed for one in self.plan if one is not None] == [0]:
                    here.continues(False)  # behind this loop, whose epoch was the last begun
                return False
            self.stand_at(planned)
            if not self.plan and planned.consumed:
                here.continues(True)
        if not self._is_resumed:
            if self._given > 1:
                self.batches.epoch += 1
            self.consumed = 0
        self._is_resumed = False
        self._given = 0
        self.batches.start = self.consumed
        return True

    def begin_pass(self, is_alive: Callable[[], object]) -> None:
        """Note that a loop begins here; `is_alive` as in `PassLog.begin_pass`."""
        self._loop = is_alive
        for other in here.live():
            if other is not self:
                other.trail.end_left()
        self.trail.begin_pass(self._position(), is_alive, self._around())

    def _around(self) -> PassLog | None:
        """Return the log of the loop in whose body one over this loader begins: the innermost."""
        around = None
        for other in here.live():
            log = other.trail
            if other is not self and log.is_in_body and (around is None or around.is_around(log)):
                around = log
        return around

    def ask(self) -> None:
        """Note the random numbers with which the loop asks for a batch, or draw on as it did."""
        if self._to_draw is not None:
            if self._to_draw.is_again:
                self._draws_after = step_state.here().random_numbers()
            step_state.start_over(self._to_draw.state)
            self._to_draw = None
        self.trail.ask(step_state.here().random_numbers)

    def give(self) -> None:
        """Count the batch that the loop gets."""
        here.gave(self)
        for other in here.live():
            if other is not self:
                other.trail.go_beside(self.trail)
        if self._draws_after is not None:
            step_state.start_over(self._draws_after)
            self._draws_after = None
        self._before = self._position(), self._given, self._is_resumed, self.account.served
        self.newest, part, shard = self.batches.given()
        self.part = part
        self.consumed = self.newest.stop
        self._given += 1
        step_state.here().gave_batch(self)
        self.trail.give()
        if not self._is_replayed:
            self.account.give(self.batches.epoch, self.newest, part, shard)
        weights, parts = self.batches.weights, shard.count
        self.heed.give(weighting.UNHEEDED if weights else weighting.uneven(len(self.newest), parts))

    def leave_out(self, skipped: Iterable[int], repeated: Iterable[int]) -> None:
        """Note samples that could not be loaded, after `give`.

        Args:
            skipped: Which of this rank's part of the newest batch.
            repeated: Which of the whole batch stand in for the part.
        """
        self.part = range(0)
        if not self._is_replayed:
            self.account.leave_out_of_newest(self.batches.epoch, self.newest, skipped, repeated)

    def end_pass(self) -> None:
        """Stand at the begin of the next epoch: the loop has come to its end."""
        step_state.here().gave_all(self)
        self.trail.end_pass()
        if not self._is_replayed:
            self._close_epoch()
        self._next_epoch()

    def go_on(self, plan: Iterable[Position | None], draws: Draws) -> None:
        """Let the next passes begin where `plan` says, and the last of them draw as it did."""
        self.plan.extend(plan)
        self.draws = draws

    def begin_cell(self, number: int) -> None:
        """Begin a cell in which all passes begin as always, or as `go_on` was told."""
        self.trail.begin_cell(
            self._position(), self._given, self._is_resumed, number, self.account.served
        )

    def commit(self) -> Commit:
        """Note a boundary, here."""
        if self._is_around_another():
            return self.trail.commit(*self._before, is_within=True)
        turn = step_state.here().followers.turn
        return self.trail.commit(
            self._position(), self._given, self._is_resumed, self.account.served, turn
        )

    def _is_around_another(self) -> bool:
        """Return whether a loop over another loader runs in the body of this one's."""
        return any(self.trail.is_around(other.trail) for other in here.live())

    def stood(self) -> Commit:
        """Return where the loader stands, for `go_back`; a boundary is not noted."""
        last = self.trail.committed
        return last._replace(
            position=self._position(),
            given=self._given,
            is_resumed=self._is_resumed,
            passes=0,
            served=self.account.served,
        )

    def go_back(self, commit: Commit) -> None:
        """Stand where the loader stood at a boundary; its next loop is another pass, as always."""
        self.batches.epoch, self.consumed = commit.position
        self.left_out.go_back(*commit.position)
        self._loop = _nobody  # what a traceback holds goes on no more
        self._given, self._is_resumed = commit.given, commit.is_resumed
        self.account.go_back(commit.served)
        self.trail.committed = commit

    def stand_at(self, position: Position) -> None:
        """Let the next loop begin there, also where nothing is left of the epoch."""
        self.batches.epoch, self.consumed = position
        self.left_out.go_back(*position)
        self._given = 0
        self._is_resumed = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the same on every rank, and good for any number of ranks."""
        return {**self.batches.state(self.consumed), "journal": self.account.state()}

    def saved(self) -> dict[str, Any]:
        """Return the position for a checkpoint: what the next batch would be in this session, too.

        After a loop that was left that is one of the next epoch, where `state_dict` tells the place
        at which it was left.
        """
        epoch, consumed = self.continues_at
        state = {**self.batches.state(consumed), "epoch": epoch}
        return {**state, "journal": self.account.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state` was taken, or where nothing is left there, at the next epoch.

        Raises:
            UsageError: The dataset has another number of samples than the state's.
            DataError: The data of a source has changed.
        """
        self.batches.load(state)
        self.stand_at(Position(state["epoch"], state["consumed"]))
        self.account.resume(state.get("journal"), *self._position())
        if self.batches.is_at_end(self.consumed):
            self._tell_left_out()
            self._close_epoch()
            self._next_epoch()

    @property
    def is_held(self) -> bool:
        """Whether the loader itself is there still: a cell made no other in its place."""
        return self.holder() is not None

    def is_of(self, state: dict[str, Any]) -> bool:
        """Return whether `state` was taken from this loader, or from one that it goes on as."""
        mine, journal = self.account.state(), state.get("journal")
        return journal is not None and all(mine[k] == journal[k] for k in ("session", "loader"))

    def is_kind_of(self, state: dict[str, Any]) -> bool:
        """Return whether `state` was taken from a loader that was made of the same, as this was."""
        journal = state.get("journal")
        return journal is not None and bool(journal["kind"] == self.account.kind)

    def resume(
        self,
        state: dict[str, Any],
        random_numbers: Any = None,
        plan: Iterable[Position | None] = (),
    ) -> None:
        """Stand where `state` was taken, and ask for the next batch with those random numbers.

        With a plan, of a cell that is run again, its passes go on as it says.

        Raises:
            UsageError: As `load_state_dict`.
        """
        self.plan.clear()  # of where the cell stood that is run again
        self.load_state_dict(state)
        if planned := list(plan):
            self.go_on(planned, Draws(random_numbers))
        elif self._is_resumed and self.consumed and random_numbers is not None:
            self._to_draw = Draws(random_numbers)

    def _position(self) -> Position:
        return Position(self.batches.epoch, self.consumed)

    def _tell_left_out(self) -> None:
        left = len(self.batches.rest(self.consumed))
        if left and not self.batches.drop_last and data_shard().index == 0:
            _log.warning(
                "%d samples of epoch %d are skipped once: fewer than the %d ranks that "
                "would share them",
                left,
                self.batches.epoch,
                data_shard().count,
            )

    def _close_epoch(self) -> None:
        """Note in the journal that the epoch is over, and what no rank was given of it."""
        epoch, rest = self.batches.epoch, self.batches.rest(self.consumed)
        if rest:
            self.account.leave_out(epoch, rest)
        self.account.end_epoch(epoch, max(self.consumed, rest.stop))

    def _next_epoch(self) -> None:
        self.batches.epoch += 1
        self.consumed = 0
        self._given = 0


class SavedPosition(NamedTuple):
    """What a checkpoint tells of a loader.

    Attributes:
        state: As `state_dict` returned it.
        is_held: Whether it was there still, as `LoaderPosition.is_held`.
        names: By what cells called it, as of `names_of`.
    """

    state: dict[str, Any]
    is_held: bool = True
    names: frozenset[str] = frozenset()


def names_of(
    loaders: Iterable[LoaderPosition], named: Mapping[str, object]
) -> list[frozenset[str]]:
    """Return by what names each loader is called, of all that cells have named."""
    held = [one.holder() for one in loaders]
    return [
        frozenset(name for name, value in named.items() if value is one and not _is_passing(name))
        if one is not None
        else frozenset()
        for one in held
    ]


def _is_passing(name: str) -> bool:
    """Return whether IPython gives a name to whatever was shown last, `_` or `_12`."""
    return name.startswith("_")


def matched(
    saved: Sequence[SavedPosition],
    loaders: Sequence[LoaderPosition],
    named: Mapping[str, object] | None = None,
) -> list[LoaderPosition | None]:
    """Return the loader that goes on with each state; None where none fits.

    One that is called the same, also where an older one that had the name lives on. Else the loader
    itself, where it does; then, from the newest on, one that was made of the same; one over as many
    samples; last the position of one that is gone, which a fault needs. Those that were held when
    they were saved choose first.

    Args:
        saved: In the order of making.
        loaders: In the order of making.
        named: What cells have named.
    """
    called = dict(zip(map(id, loaders), names_of(loaders, named or {}), strict=True))
    found: list[LoaderPosition | None] = [None] * len(saved)
    free = list(loaders)
    fits: tuple[Callable[[LoaderPosition, SavedPosition], bool], ...] = (
        lambda one, wanted: bool(called[id(one)] & wanted.names),
        lambda one, wanted: one.is_held and one.is_of(wanted.state),
        lambda one, wanted: one.is_held and one.is_kind_of(wanted.state),
        lambda one, wanted: one.is_held,
        lambda one, wanted: True,
    )
    for was_held, fit in itertools.product((True, False), fits):
        for number in reversed(range(len(saved))):
            wanted = saved[number]
            if found[number] is not None or wanted.is_held is not was_held:
                continue
            fitting = (
                one
                for one in reversed(free)
                if one.batches.samples == wanted.state["samples"] and fit(one, wanted)
            )
            if (chosen := next(fitting, None)) is not None:
                found[number] = chosen
                free.remove(chosen)
    return found


def _nobody() -> None:
    """Stand for a loader that is gone."""


def _do_nothing(*_: bool) -> None:
    """Stand for what is called around a pass."""


class Positions(Component):
    """The positions of all loaders of a process, and where those stand that a cell is to make.

    Attributes:
        before_pass: Called before each pass of a loop over a loader.
        passed_over: Called for each pass that is done, in a cell that is run again.
        continues: Called where such a cell's training continues; whether in the midst of a loop.
    """

    def __init__(self) -> None:
        self.before_pass: Callable[[], None] = _do_nothing
        self.passed_over: Callable[[], None] = _do_nothing
        self.continues: Callable[[bool], None] = _do_nothing
        self._next_number = 1
        self._live: weakref.WeakSet[LoaderPosition] = weakref.WeakSet()
        # Each step asks, and a weak set takes microseconds to say that it is empty.
        self._were_made = False
        self._newest: weakref.ref[LoaderPosition] | None = None
        self._pending: list[tuple[dict[str, Any], Any, list[Position | None]]] = []

    def cell_began(self, start: CellStart) -> None:
        """Begin a cell: its batches are others, and no loader takes what was left for one."""
        self._newest = None
        self._pending.clear()

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Return what is to be said of samples that loaders left out, once."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        notices = (one.left_out.take_notice(rank) for one in self.in_order())
        return tuple(notice for notice in notices if notice)

    def next_number(self) -> int:
        """Return the number of a loader that is made."""
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def number_after(self, number: int) -> None:
        """Have the next loader be newer than one that this rank got from another."""
        self._next_number = max(self._next_number, number + 1)

    def add(self, one: LoaderPosition) -> None:
        """Note a loader's position, as long as it lives."""
        self._were_made = True
        self._live.add(one)

    def live(self) -> list[LoaderPosition]:
        """Return the position of every loader that is alive, or may be gone back to."""
        return list(self._live) if self._were_made else []

    def in_order(self) -> list[LoaderPosition]:
        """Return `live` in the order of making."""
        return sorted(self.live(), key=lambda one: one.number)

    def gave(self, one: LoaderPosition) -> None:
        """Note whose loader gives the newest batch."""
        self._newest = weakref.ref(one)

    def newest(self) -> LoaderPosition | None:
        """Return that of the loader which gave the newest batch of this cell."""
        return None if self._newest is None else self._newest()

    def resume_later(
        self,
        state: dict[str, Any],
        random_numbers: Any = None,
        plan: Iterable[Position | None] = (),
    ) -> None:
        """Have the next loader over as many samples `resume` so, if it is made in this cell."""
        self._pending.append((state, random_numbers, list(plan)))

    def take_pending(self, new: LoaderPosition) -> None:
        """Have a loader that is made stand where `resume_later` said."""
        fitting = [one for one in self._pending if one[0]["samples"] == new.batches.samples]
        for pending in sorted(fitting, key=lambda one: not new.is_kind_of(one[0]))[:1]:
            self._pending.remove(pending)
            new.resume(*pending)


here = Positions()
