"""Where loops over loaders go on, when a cell is run again after a fault.

Each boundary notes every loader's position, and a fault puts it back there. Loaders are told apart
by the order in which the cell makes them: run again, it makes others, which go on in their place.

Loops go on when what was trained goes on, and start over with an optimizer that the cell makes
again. Of a cell that had made its optimizers that is known when one first steps in it again, and
batches are taken before. So it starts over, and all that going on needs is kept. When an optimizer
steps that the cell had made before (behind `if "model" not in globals()`), nothing has been trained
yet: the step is refused, and the cell run once more, to go on.

Main thread.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.data.order.sampler import Spec
from nbdist.engine.data.position import journal, position
from nbdist.engine.data.position.account import Account
from nbdist.engine.data.position.journal import JournalEntry
from nbdist.engine.data.position.passes import Commit, Draws, PassLog, Position
from nbdist.engine.data.position.position import LoaderPosition
from nbdist.engine.kernel import location
from nbdist.engine.steps import keep, step_state
from nbdist.engine.steps.repeated_epochs import RepeatedEpochs
from nbdist.shared.text import counted
from nbdist.shared.wire import CellStart, Repeat

_Mark = list[tuple[PassLog, Commit]]


class _LoaderPlan(NamedTuple):
    """Where a loader that the cell makes goes on: what it is, its passes' `plan`, its `account`.

    The last pass of the plan goes on with the random numbers `draws`, after so many batches
    (`served`).
    """

    spec: Spec
    plan: list[Position | None]
    draws: Draws
    account: Account
    served: int


class _LoaderPlace(NamedTuple):
    """Where a loader that was there goes on: its passes' `plan`, where it `stood`, and `began`.

    The last pass of the plan goes on with the random numbers `draws`.
    """

    plan: list[Position | None]
    draws: Draws
    stood: Commit
    began: Commit


class Restored(NamedTuple):
    """Where a checkpoint has put a loader: None where there is none yet that is this one.

    `plan` is that of the passes of the cell that was saved in; `at` is its position.
    """

    loader: LoaderPosition | None
    plan: list[Position | None]
    at: Position
    draws: Draws


@dataclass(frozen=True, slots=True)
class _CellRerun:
    """How a cell is run again, also when others have run since.

    `continues` says that the optimizers which stepped were there before the cell; else `optimizers`
    are those that it had made. `made` are the loaders that the cell makes, `live` all that there
    are, each with where its passes go on. `trained` are parameters, one a group, with the steps
    that their optimizer has made. `began` and `kept` are the random numbers with which the
    cell begins that starts over, or goes on after all; `entries` is the journal for the latter.
    """

    number: int
    continues: bool
    has_stepped: bool
    made: list[_LoaderPlan]
    live: list[tuple["weakref.ref[LoaderPosition]", _LoaderPlace]]
    optimizers: list["weakref.ref[Optimizer]"]
    trained: list[tuple["weakref.ref[torch.Tensor]", int]] = field(default_factory=list)
    began: step_state.StepState | None = None
    kept: step_state.StepState | None = None
    entries: list[JournalEntry] | None = None

    @property
    def plans(self) -> list[list[Position | None]]:
        """Where the passes of each of its loaders go on."""
        return [planned.plan for planned in self.made] + [place.plan for _, place in self.live]

    def note_draws(self) -> None:
        """Note this rank's random numbers for loops that had not asked for the batch they go on at.

        Run again, the cell draws before it comes there, as an evaluation around the loop does. What
        was drawn by hand before that, to do the rest of a half step, counts.
        """
        places: list[_LoaderPlan | _LoaderPlace] = [*self.made, *(place for _, place in self.live)]
        for one in places:
            at = one.plan[-1] if one.plan else None
            is_in_midst = at is not None and at.consumed
            if is_in_midst and one.draws.state is None:
                one.draws.state = step_state.here().random_numbers()


@dataclass
class _Cell:
    """The loaders of the cell that runs, or has just ended. `number` counts the session's cells."""

    number: int = 0
    made: list[tuple[Spec, PassLog, Account]] = field(default_factory=list)
    inherited: list[_LoaderPlan] = field(default_factory=list)
    # A loader that only its loop held would go with the exception, and its position with it.
    newest: "deque[LoaderPosition]" = field(default_factory=lambda: deque(maxlen=16))
    taken_over: _CellRerun | None = None  # in a replacement rank, which has not run it
    repeats: _CellRerun | None = None  # as which this cell was begun
    continues: str = ""  # where, as a sentence that is yet to be said

    def add(self, new: LoaderPosition) -> None:
        """Note a loader that this cell makes; run again, the cell makes it go on."""
        spec, nth = new.batches.spec(), len(self.made)
        self.made.append((spec, new.trail, new.account))
        self.newest.append(new)
        if nth < len(self.inherited) and self.inherited[nth].spec == spec:
            planned = self.inherited[nth]
            new.go_on(planned.plan, planned.draws)
            if planned.plan or planned.account.loader == planned.account.born:
                new.account.continue_as(planned.account, planned.served if planned.plan else 0)

    def again(self) -> _CellRerun:
        """Return how it would be run again."""
        if self.taken_over is not None:
            return self.taken_over
        if self.repeats is not None and not step_state.has_stepped():
            # It came to nothing: what held before it still does.
            return replace(self.repeats, number=self.number)
        return _CellRerun(
            self.number,
            step_state.continues(),
            step_state.has_stepped(),
            [
                _LoaderPlan(
                    spec, trail.plan(), trail.committed.draws, account, trail.committed.served
                )
                for spec, trail, account in self.made
            ],
            [(weakref.ref(one), _place(one)) for one in position.here.live()],
            [weakref.ref(one) for one in step_state.here().made()],
            _trained(step_state.here()),
            step_state.here().at_cell_begin,
        )


def title() -> str:
    """Return what runs, as a sentence begins with it."""
    name = location.here.name_running()
    return "The cell" if name == "the cell" else name


def _trained(boundary: step_state.StepBoundary) -> list[tuple["weakref.ref[torch.Tensor]", int]]:
    return [
        trained
        for one in boundary.stepped()
        for trained in _trained_by(one, boundary.steps[one].whole)
    ]


def _trained_by(optimizer: Optimizer, steps: int) -> list[tuple["weakref.ref[torch.Tensor]", int]]:
    groups = (group["params"] for group in optimizer.param_groups)
    return [(weakref.ref(parameters[0]), steps) for parameters in groups if parameters]


def _kept_model(again: _CellRerun, optimizer: Optimizer) -> str:
    """Return what is said where a new optimizer trains what the attempt before has trained."""
    steps = {id(one): made for where, made in again.trained if (one := where()) is not None}
    own = (id(p) for group in optimizer.param_groups for p in group["params"])
    made = max((steps.get(one, 0) for one in own), default=0)
    if not made:
        return ""
    return f" Its model is not created again, and has made {counted(made, 'step')} before."


def _place(one: LoaderPosition) -> _LoaderPlace:
    trail = one.trail
    return _LoaderPlace(trail.plan(), trail.committed.draws, one.stood(), trail.began)


def _moved(place: _LoaderPlace, restored: Restored | None) -> _LoaderPlace:
    if restored is None:
        return place
    # A checkpoint from before the cell: its loops begin where the loader stands.
    is_of_cell = restored.at >= place.began.position
    return place._replace(plan=restored.plan if is_of_cell else [], draws=restored.draws)


def _forget_accounts(again: _CellRerun) -> None:
    """Forget what the loaders were given that a cell had made, which starts over."""
    for planned in again.made:
        journal.here().forget(planned.account.loader)


_Handed = tuple[
    int,
    bool,
    bool,
    list[_LoaderPlan],
    list[tuple[LoaderPosition, _LoaderPlace]],
    list[tuple[Optimizer, int]],  # with its steps
]


def weigh_newest() -> None:
    """Note that the newest batch's gradient is weighed by its part: `layout.step` does."""
    if (newest := position.here.newest()) is not None:
        newest.heed.weigh()


def count_copied() -> None:
    """Note that this rank has copied the step that it had lost: its batches are trained on."""
    for live in position.here.live():
        live.trail.count_copied()


def half_done() -> list[str]:
    """Return what is said of loaders with whose batches the cell makes several steps each."""
    around = [one for one in position.here.in_order() if one.trail.is_around_steps]
    if not around or not step_state.continues():
        return []
    called = (min(names, default="") for names in position.names_of(around, keep.here.named()))
    names = ", ".join(name or "a loader" for name in called)
    line = (
        f"A batch of {names} may be half done: several steps are made with one, and how many are "
        f"left is not known. Run again, {location.here.name_running()} goes on with the next "
        "batch. Restore a checkpoint from before it (nbdist.restore()), and run it again."
    )
    return [line]


def _take() -> _Mark:
    """Note every loader's position: an optimizer has stepped on what was given."""
    if (newest := position.here.newest()) is not None:
        newest.heed.step()
    return [(live.trail, live.commit()) for live in position.here.live()]


def _restore(mark: _Mark) -> None:
    """Put every loader back where it stood at a boundary; one made since stands at its begin."""
    commits = {id(trail): commit for trail, commit in mark}
    for live in position.here.live():
        commit = commits.get(id(live.trail), live.trail.began)
        if live.trail.goes_back_to(commit):
            live.go_back(commit)
            live.trail.forget_after(commit)


class Loops(Component):
    """The loops of the cell that runs, or has just ended, and how a failed cell is run again."""

    def __init__(self) -> None:
        self._cell = _Cell()
        self._again: _CellRerun | None = None
        self._repeated = RepeatedEpochs(step_state.here().followers)

    def cell_began(self, start: CellStart) -> None:
        """Let loops begin as always, or, in a cell that is run again, go on where they stood.

        A rank on which the cell that failed has ended well learns so that it failed elsewhere.
        """
        if self._again is None or self._again.number != start.failed:
            self._again = None
            if self._cell.number == start.failed:
                self._again = self._cell.again()
                step_state.here().fail_elsewhere()
        again = None if start.repeat is Repeat.NO else self._again
        if again is None:
            self._repeated.forget()
        elif not self._came_to_nothing(start.failed):
            self._repeated.begin(is_same=not start.is_changed)
        if again is not None and not again.continues:
            again = replace(
                again,
                continues=start.repeat is Repeat.CONTINUE,
                kept=again.kept or step_state.here().random_numbers(),
                entries=journal.here().entries() if again.entries is None else again.entries,
            )
        self._cell = _Cell(start.number, repeats=again)
        for live in position.here.live():
            live.plan.clear()
        self._cell.continues = "" if again is None else self._prepare(again)
        for live in position.here.live():
            live.begin_cell(start.number)

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Forget what has been put back, or is not needed: the cell has trained, or ended well."""
        if cell.has_succeeded or step_state.has_stepped():
            self._repeated.forget()
        return ()

    def _came_to_nothing(self, number: int | None) -> bool:
        """Return whether the cell of that number was run again, and no optimizer has stepped."""
        is_again = self._cell.repeats is not None and self._cell.number == number
        return is_again and not step_state.has_stepped()

    def _put_back(self, is_in_midst: bool) -> None:
        """Put back what the cell has moved before its training continues, and say so."""
        put = self._repeated.put_back(is_in_midst=is_in_midst)
        if dist.get_rank() == 0:
            for line in put.sentences:
                print(line)

    def say_position(self) -> None:
        """Say where the cell continues, once its first loop begins: a checkpoint may move it."""
        line, self._cell.continues = self._cell.continues, ""
        if line and dist.get_rank() == 0:
            print(line)

    def add(self, new: LoaderPosition) -> None:
        """Note a loader that the cell makes."""
        self._cell.add(new)

    def cell_number(self) -> int:
        """Return the number of the cell that runs, or has just ended."""
        return self._cell.number

    def continues_with(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether the cell is run again with optimizers that have stepped in it before."""
        again = self._cell.repeats
        if again is None or again.continues:
            return again is not None
        known = [made() for made in again.optimizers]
        return any(one is made for one in optimizers for made in known)

    def continues(self) -> bool:
        """Return whether the cell is run again, and its loops go on where they stood."""
        return self._cell.repeats is not None and self._cell.repeats.continues

    def continues_trained(self) -> bool:
        """Return whether the cell is run again with what it had trained before."""
        return (
            self.continues() and self._cell.repeats is not None and self._cell.repeats.has_stepped
        )

    def has_loops_to_continue(self) -> bool:
        """Return whether loops over loaders had trained in the cell that is run again."""
        return self._cell.repeats is not None and any(self._cell.repeats.plans)

    def are_loops_begun(self) -> bool:
        """Return whether loops of the cell have trained: run by hand, they would start over."""
        trails = [trail for _, trail, _ in self._cell.made]
        trails += [live.trail for live in position.here.live()]
        return any(trail.plan() for trail in trails)

    def forget_repeated(self) -> None:
        """Let the cell that is run again be a cell like others: it goes on from a checkpoint."""
        self._cell.repeats, self._cell.inherited, self._cell.continues = None, [], ""
        self._repeated.forget()

    def continues_restored(self) -> None:
        """Note that the cell continues where a checkpoint has put it: what follows the steps is so.

        Numbers are not in it: the cell counts them again from its begin.
        """
        self.forget_repeated()
        self._repeated.begin(is_same=True, has_numbers=False)

    def stay_where_restored(self, restored: Iterable[Restored]) -> None:
        """Have a cell that is run again go on where a checkpoint has put its loaders."""
        if self._again is None or not self._again.continues:
            return
        ordered = list(restored)
        there = {id(one.loader): one for one in ordered if one.loader is not None}
        live = [(where, _moved(place, there.get(id(where())))) for where, place in self._again.live]
        # Loaders that the cell makes are gone; the checkpoint has them in the order of making.
        gone, made = [one for one in ordered if one.loader is None], self._again.made
        if len(gone) == len(made):
            made = [m._replace(plan=o.plan, draws=o.draws) for m, o in zip(made, gone, strict=True)]
        self._again = replace(self._again, made=made, live=live)

    def _begin_steps(self, optimizer: Optimizer) -> None:
        """Refuse the first step of a cell that starts over, where it has to go on."""
        again = self._cell.repeats
        if again is None or again.continues or step_state.has_stepped():
            return
        if any(made() is optimizer for made in again.optimizers):
            raise step_state.KeptOptimizerError(
                f"The optimizer existed before {location.here.name_running()} was run again, so it "
                "continues."
            )
        self._repeated.forget()
        _forget_accounts(again)
        if again.has_stepped and dist.get_rank() == 0:
            print(
                f"{title()} starts over: it creates its optimizer again, and loops start from the "
                f"beginning.{_kept_model(again, optimizer)}"
            )

    def hand_over(self) -> dict[str, list[_Handed]]:
        """Return what a new rank must know to run a cell again: the last, or one that failed."""
        steps = step_state.here().steps
        whole = {one: steps[one].whole for one in step_state.here().whole() if one in steps}
        cells = [
            (
                again.number,
                again.continues,
                again.has_stepped,
                again.made,
                [(one, place) for where, place in again.live if (one := where())],
                [(made, n) for made, n in whole.items() if weakref.ref(made) in again.optimizers],
            )
            for again in (self._cell.again(), self._again)
            if again is not None
        ]
        return {"cells": cells}

    def take_over(self, handed: dict[str, list[_Handed]]) -> None:
        """Know, in a replacement rank, what `hand_over` told on the rank it was cloned from."""
        if "cells" not in handed:
            return  # it did not come whole
        last, *failed = [
            # Without random numbers: they were the other rank's.
            _CellRerun(
                number,
                continues,
                has_stepped,
                made,
                [(weakref.ref(one), place) for one, place in live],
                [weakref.ref(one) for one, _ in optimizers],
                [trained for one, steps in optimizers for trained in _trained_by(one, steps)],
            )
            for number, continues, has_stepped, made, live, optimizers in handed["cells"]
        ]
        self._cell.number, self._cell.taken_over = last.number, last
        self._again = failed[0] if failed else None

    def install(self) -> None:
        """Take and put back the loaders' positions with every step boundary from now on."""
        step_state.also(_take, _restore)
        step_state.here().before_first_step = self._begin_steps
        position.here.passed_over = self._repeated.passed_over
        position.here.continues = self._put_back

    def _prepare(self, again: _CellRerun) -> str:
        """Let every loader stand where the cell goes on; returns where, for people."""
        living = [(live, place) for where, place in again.live if (live := where()) is not None]
        if not again.continues:
            step_state.start_over(again.began)
            for live, place in living:
                live.go_back(place.began)
            if not again.has_stepped:
                _forget_accounts(again)
            return ""
        step_state.here().followers.run_again()
        if again.kept is not None:  # it had started over
            step_state.start_over(again.kept)
            journal.here().put_back(again.entries or [])
            for live, place in living:
                live.go_back(place.stood)
        again.note_draws()
        for live, place in living:
            live.go_on(place.plan, place.draws)
        self._cell.inherited = again.made
        ends = {at for plan in again.plans if plan and (at := plan[-1]) is not None}
        ends = {at for at in ends if at.consumed} or ends  # those that are in the midst of an epoch
        places = sorted(f"sample {at.consumed:,} of epoch {at.epoch}" for at in ends)
        what = title()
        return f"{what} continues: its loader is at {', '.join(places)}." if places else ""


here = Loops()
