"""Know what moves with the steps beside models: schedulers, averages, scalers, counters.

`find_followers` finds what that may be. It is watched here, and so are `numbers`, the *options* of
optimizers among them. A *turn* goes from one
batch of the trained loader to the next (without a loader: to the next step of an optimizer that has
stepped in it). Where a turn begins, each of these is *marked*: a few of its numbers, and the
versions of its tensors. What two marks tell apart has moved in that turn, and the turns between
moves tell in which it is *due* again. A fault in a turn whose optimizer has stepped then leaves
*lacking* what is due and has not moved: the step is half done. In a cell's first turn no move may
show what follows: what its code sets is then *unknown*.

Main thread.
"""

import itertools
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from nbdist.engine.compat import torch_live
from nbdist.engine.steps import keep
from nbdist.engine.steps.followers.code_names import loop_targets, reached, stored
from nbdist.engine.steps.followers.find_followers import (
    MOST_ITEMS,
    Found,
    has_state,
    hold,
    loose_schedulers,
    search,
)
from nbdist.engine.steps.followers.grown_lists import is_length
from nbdist.engine.steps.followers.history import History
from nbdist.engine.steps.followers.marks import Mark, hides_writes, mark
from nbdist.engine.steps.followers.numbers import Number, Numbers, is_option, stored_as
from nbdist.engine.steps.followers.progress import Progress
from nbdist.engine.steps.followers.tuned_by_hand import MOST_GROUPS, TunedByHand
from nbdist.engine.steps.followers.written_weights import WrittenWeights

Optimizer = torch.optim.Optimizer
_Now = tuple[dict[str, Mark], dict[str, Number]]  # marks, and numbers

_KEPT_TURNS = 3


def _keep_nothing() -> None:
    """Keep nothing of what follows the steps: faults are not recovered from."""


class Stepped(Protocol):
    """What an optimizer has done.

    Attributes:
        whole: Steps.
        opened: For `Followers`: the turn of the last one, as often as turns had begun.
    """

    whole: int
    opened: int


class Handed(NamedTuple):
    """What a new rank learns: lists' lengths to be, names that loops set, and that steps move."""

    lengths: dict[str, int]
    set_by_failed: frozenset[str]
    moving: frozenset[str]


class Followers:
    """What follows the steps on this rank."""

    def __init__(self, steps: Mapping[Optimizer, Stepped], tell: Callable[[str], None]) -> None:
        """Follow nothing yet.

        Args:
            steps: What each optimizer has done; it changes meanwhile.
            tell: Has a sentence said.
        """
        self._steps = steps
        self._tell = tell
        self._told: set[str] = set()  # names of what lies beyond a search
        self._turn = 1
        self._has_stepped = False
        self._opened = 0  # times that a turn has begun
        self._objects: dict[str, Callable[[], Any]] = {}
        self._optimizers: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._watched = Numbers()
        self._marks: dict[str, Mark] = {}
        self._numbers: deque[dict[str, Number]] = deque(maxlen=_KEPT_TURNS)
        self._history: dict[str, History] = {}
        self._look_at = 0
        self._source: ref[object] | None = None  # which gave the newest batch
        self._trained_on: WeakSet[Any] = WeakSet()
        self._due: list[Callable[[], None]] = []
        self._set_by_loops: frozenset[str] = frozenset()
        self._set_by_failed: frozenset[str] = frozenset()  # by those of the one that failed last
        self._moved_elsewhere: frozenset[str] = frozenset()  # on the rank of which this one is
        self._is_by_loader = False  # the turn began with a batch, or with the end of a loop
        self._reached: frozenset[str] | None = None  # names that the cell leads to; None: any
        self._stored: frozenset[str] | None = None  # names that its code sets; None: any
        self._made_after_step: set[str] = set()  # lists and dicts of this turn: they lack nothing
        self._first_turn = 1  # of the cell
        self._begins_with_cell = False  # the turn, and no loader has given a batch since
        self._keep: Callable[[], Any] = _keep_nothing
        self._kept: tuple[int, Any] = 0, None
        self._written = WrittenWeights()
        self._by_hand = TunedByHand()

    # -- events

    def gave_batch(self, source: object) -> None:
        """Note a batch of a loader: where it is the trained one, the step before is whole."""
        self._source = ref(source)
        if self._has_stepped:
            if source in self._trained_on:
                self.next_turn(is_by_loader=True)
        elif self._begins_with_cell:
            self._begin_with_batch()

    def gave_all(self, source: object) -> None:
        """End the turn with its loop: run again, what follows the loop is done again."""
        if self._has_stepped and source in self._trained_on:
            self.next_turn(is_by_loader=True)
            self._kept = self._turn, self._keep()

    def before_step(self, steps: Stepped | None) -> None:
        """Begin a turn where no loader has: an optimizer steps a second time in it."""
        if steps is not None and self._has_stepped and steps.opened == self._opened:
            self.next_turn()
        if not self._look_at:
            self._look()

    def after_step(self, steps: Stepped, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        steps.opened = self._opened
        self._written.stepped(optimizer)
        if not self._has_stepped:
            self._has_stepped = True
            if self._source is not None and (source := self._source()) is not None:
                self._trained_on.add(source)

    def look_at_weights(self, optimizer: Optimizer) -> None:
        """Have `wrote_weights` know of this turn; right after the optimizer's step."""
        self._written.stepped(optimizer, is_looked_at=True)

    def writes_weights(self, optimizer: Optimizer) -> bool:
        """Return whether a loop is known to write weights after this optimizer's steps."""
        return optimizer in self._written.written()

    def wrote_weights(self, optimizer: Optimizer) -> bool:
        """Return whether weights were written after this optimizer's step, as a turn has ended."""
        return self._written.wrote(optimizer)

    def keep_by(self, keep: Callable[[], Any]) -> None:
        """Have what `keep` returns kept as a loop ends, for a fault before the next step."""
        self._keep = keep

    def kept(self) -> Any:
        """Return what was kept as this turn began; None: nothing was."""
        return self._kept[1] if self._kept[0] == self._turn else None

    def at_next_turn(self, do: Callable[[], None]) -> None:
        """Call `do` when this turn is over, or now, where none of its optimizers has stepped."""
        if self._has_stepped:
            self._due.append(do)
        else:
            do()

    def begin_cell(self) -> None:
        """Begin a turn; what a fault has left open is over if an optimizer has stepped in it."""
        self._due.clear()
        if self._has_stepped:
            self._close()
        self._look_at, self._kept = 0, (0, None)
        self._first_turn = self._turn
        self._written.begin_cell()
        self._open()
        self._begins_with_cell = True

    def end_cell(self, source: str, *, is_failed: bool) -> None:
        """End the last turn of a cell that went well; of one that failed, note its loops' names."""
        if is_failed or self._has_stepped or self._turn > self._first_turn:
            self._watched.lists.stay()
        self._set_by_loops = loop_targets(source)
        self._reached = self._stored = None
        if is_failed:
            self._set_by_failed = self._set_by_loops
            self._reached = reached(source, keep.here.names())
            self._stored = stored(source, self._reached, keep.here.names())
        if self._has_stepped and not is_failed:
            self.next_turn()

    def next_turn(self, *, is_by_loader: bool = False) -> None:
        """End the running turn, for all that belongs to its step is done, and begin another."""
        self._written.turn_ended()
        self._by_hand.turn_ended()
        due, self._due = self._due, []
        now: _Now | None = self._close()
        if self._turn >= self._look_at:
            self._look()
            self._look_at = self._turn + min(MOST_ITEMS, 1 + self._age() // 2)
            now = None
        self._open(now, is_by_loader=is_by_loader)
        for do in due:
            do()

    # -- turns

    @property
    def turn(self) -> int:
        """The number of the turn that runs, on this rank."""
        return self._turn

    def _begin_with_batch(self) -> None:
        """Note the numbers again: what comes before the cell's first loop is no part of its turn.

        Objects are noted as an optimizer steps, for a scaler makes its numbers in the forward.
        """
        self._begins_with_cell, self._is_by_loader = False, True
        self._find_numbers(self._search())
        self._numbers[-1] = self._watched.read()
        for name in self._numbers[-1]:
            self._history.setdefault(name, History(self._turn))

    def _close(self) -> _Now:
        """Note what has moved in the turn that is over; return how all of it stands."""
        now = self._now()
        stepped = self._stepped(now[0])
        for name in self._moved(now):
            self._history[name] = self._history[name].after_move(self._turn, stepped)
        self._turn += 1
        self._has_stepped = False
        return now

    def _stepped(self, marks: Mapping[str, Mark]) -> frozenset[str]:
        """Return the names of the optimizers that have stepped in the running turn."""
        began = self._marks
        return frozenset(n for n in self._optimizers.values() if marks.get(n) != began.get(n))

    def _open(self, now: _Now | None = None, *, is_by_loader: bool = False) -> None:
        self._has_stepped = self._begins_with_cell = False
        self._is_by_loader = is_by_loader
        self._made_after_step.clear()
        self._opened += 1
        self._marks, numbers = now or self._now()
        self._numbers.append(numbers)
        for name in itertools.chain(self._marks, numbers):
            if name not in self._history:
                self._history[name] = History(self._turn)

    def _now(self) -> _Now:
        return self._marked(), self._watched.read()

    def _age(self) -> int:
        return self._turn - min((one.born for one in self._history.values()), default=self._turn)

    def _moved(self, now: _Now) -> list[str]:
        """Return what has moved in the running turn."""
        marks, numbers = now
        began = self._numbers[-1] if self._numbers else {}
        moved = [name for name, value in numbers.items() if began.get(name, value) != value]
        moved += [name for name, mark in marks.items() if self._marks.get(name, mark) != mark]
        return moved

    def _marked(self) -> dict[str, Mark]:
        marks = {name: mark(one) for name, one in self.living().items()}
        for optimizer, name in self._optimizers.items():
            marks[name] = self._count(optimizer)
        return marks

    def _count(self, optimizer: Optimizer) -> Mark:
        """Return what tells a step of an optimizer."""
        steps = self._steps.get(optimizer)
        return (0 if steps is None else steps.whole,)

    def living(self) -> dict[str, Any]:
        """Return what is followed, by the names that lead there."""
        return {n: one for n, held in self._objects.items() if (one := held()) is not None}

    # -- the search

    def still(self) -> list[Any]:
        """Return what has been followed for more than a turn and has never moved."""
        moving = set(self.moving())
        return [one for name, one in self.living().items() if name not in moving]

    def look(self) -> None:
        """Look for what has been made since the last search, and mark it."""
        self._look()

    def _look(self) -> None:
        self._look_at = max(self._look_at, self._turn + 1)
        found = self._search()
        for name in sorted(found.beyond.keys() - self._told):
            self._told.add(name)
            self._tell(found.beyond[name])
        loose = loose_schedulers(found, [o for o, made in self._steps.items() if made.whole])
        objects = self._as_known({**found.followers, **loose})
        known = {n: held for n, held in self._objects.items() if held() is objects.get(n)}
        self._objects = {n: known.get(n) or hold(one, n) for n, one in objects.items()}
        names = {o: self._optimizers.get(o, name) for name, o in found.optimizers.items()}
        self._forget_made_anew({n for o, n in names.items() if o not in self._optimizers})
        self._optimizers = WeakKeyDictionary(names)
        self._find_numbers(found)
        for name, one in objects.items():
            if name not in known:
                if self._has_stepped and isinstance(one, list | dict):
                    self._made_after_step.add(name)
                self._history[name] = History(self._turn)
                self._marks[name] = mark(one)
        for optimizer, name in self._optimizers.items():
            self._marks.setdefault(name, self._count(optimizer))
            self._history.setdefault(name, History(self._turn))
        if self._numbers:
            began, now = self._numbers[-1], self._watched.read()
            for name in [n for n in began if n not in now and is_option(n)]:
                del began[name]  # a scheduler sets it
            began.update({n: v for n, v in now.items() if n not in began})
            for name in began:
                self._history.setdefault(name, History(self._turn))

    def _search(self) -> Found:
        return search(keep.here.kept(), keep.here.names(), torch_live.here.live(Optimizer))

    def _find_numbers(self, found: Found) -> None:
        loose = loose_schedulers(found, found.optimizers.values())
        self._by_hand.watch((*found.followers.values(), *loose.values()))
        names = {one: self._optimizers.get(one, name) for name, one in found.optimizers.items()}
        scheduled = {one for one in names if self._by_hand.is_scheduled(one)}
        self._watched.watch(found, names, scheduled)

    def _forget_made_anew(self, names: set[str]) -> None:
        """Forget when an optimizer stepped whose name means another one now, and what moved then.

        What follows the other one shows by its next move.
        """
        for name, history in list(self._history.items()):
            if history.beside & names or name in names:
                beside = frozenset() if name in names else history.beside
                self._history[name] = History(self._turn, beside=beside)

    def _as_known(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was found under the names that it had: a loop may have bound another one.

        But for a name that leads to what is new: what had it only lives on, in a traceback say.
        """
        names = {id(one): name for name, one in self.living().items()}
        new = {name for name, one in found.items() if id(one) not in names}
        known = {name: names.get(id(one), name) for name, one in found.items()}
        return {name if known[name] in new else known[name]: one for name, one in found.items()}

    # -- after a fault

    def progress(self) -> Progress:
        """Return how far this rank has come in the turn that a fault has ended."""
        marked = self._now()
        moved, stepped = set(self._moved(marked)), self._stepped(marked[0])
        optimizers, living = set(self._optimizers.values()), self.living()
        new, due = self._may_be_new(), self._due_after(stepped)
        follows = {n for n, h in self._history.items() if h.moved is not None or n in moved}
        began = self._numbers[-1] if self._numbers else {}
        before = self._numbers[-2] if len(self._numbers) > 1 else {}
        now = self._watched.read()
        numbers = {n for n in follows | new if n in began and n not in self._set_by_loops}
        lacking, unknown = self._left(due, new, numbers, moved)
        last = {n for n, history in self._history.items() if history.moved == self._turn - 1}
        # From a batch on the loop's body runs again, and so does all that it counts.
        ahead = moved - optimizers
        if not self._is_by_loader:
            ahead = {n for n in ahead if n in living or self._history[n].moved is not None}
        did = (moved if self._has_stepped else last) - self._set_by_loops - optimizers
        named = {n: type(living[n]).__name__ for n in living if n in follows | due | new}
        return Progress(
            has_stepped=self._has_stepped,
            lacking=tuple(sorted(lacking)),
            unknown=tuple(sorted(unknown)),
            optimizers=tuple(sorted(lacking & optimizers)),
            ahead=() if self._has_stepped else tuple(sorted(ahead - self._set_by_loops)),
            did=tuple(sorted(did)),
            kinds=dict.fromkeys(numbers | optimizers, "") | named,
            began={n: began[n] for n in sorted(numbers)},
            before={n: before[n] for n in sorted(numbers) if n in before},
            now={n: now[n] for n in sorted(numbers) if n in now},
            stepped=tuple(sorted(stepped)),
            written=tuple(sorted(map(self._change_after, self._written.written()))),
            is_open=self._has_stepped and self._is_by_loader,
            beyond=self._beyond(),
        )

    def _due_after(self, stepped: frozenset[str]) -> set[str]:
        """Return what moves in such a turn as this, as far as its moves have shown."""
        return {
            name
            for name, history in self._history.items()
            if history.is_due(self._turn, stepped)
            and self._is_there(name)
            and self._is_moved_here(name, history)
        }

    def _may_be_new(self) -> set[str]:
        """Return what has never moved, and may follow a cell's first step."""
        if self._turn != self._first_turn:
            return set()
        new = {n for n, h in self._history.items() if h.moved is None and self._may_follow(n)}
        return new - self._made_after_step

    def _left(
        self, due: set[str], new: set[str], numbers: set[str], moved: set[str]
    ) -> tuple[set[str], set[str]]:
        """Return what the turn's step lacks, and what it may lack; nothing before a step."""
        if not self._has_stepped:
            return set(), set()
        known, may_lack = self._known(due, numbers)
        lacking = known - moved
        # From step to step, what moves before the next one looks like what follows this one.
        unknown = {n for n in (new | may_lack) - known - moved if not is_length(n)}
        for optimizer, is_certain in self._written.missing():
            (lacking if is_certain else unknown).add(self._change_after(optimizer))
        for optimizer, at, is_certain in self._by_hand.missing():
            option = f"{self._optimizers.get(optimizer, '')}.param_groups[{at}]['lr']"
            (lacking if is_certain else unknown).add(option)
        return lacking, unknown

    def _known(self, due: set[str], numbers: set[str]) -> tuple[set[str], set[str]]:
        """Return what of the due moves for certain, and what may."""
        living, history = self.living(), self._history
        known = {n for n in due if n in self._objects or n in self._optimizers.values()}
        # Of tensors that no object calls its state only those that move with the steps count.
        known = {n for n in known if has_state(living.get(n)) or history[n].moved}
        options = {n for n in due & numbers if is_option(n) and history[n].moved}
        # Of other numbers only counters: what is set again each time lacks nothing.
        counts = {n for n in due & numbers if type(self._numbers[-1][n]) is int}
        counters = {n for n in counts if history[n].moved}
        if self._is_by_loader:
            known |= counters
        known = (known - options) | {n for n in options if history[n].is_regular(self._turn)}
        unseen = {n for n in known if history[n].moved is None}
        return known - unseen, unseen | options | counters

    def _beyond(self) -> tuple[str, ...]:
        """Return what is not looked at, in words."""
        moving = set(self.moving())
        options = [
            f"{name}.param_groups[{MOST_GROUPS}:]"
            for optimizer, name in self._optimizers.items()
            if len(optimizer.param_groups) > MOST_GROUPS
        ]
        if any(n not in moving and hides_writes(one) for n, one in self.living().items()):
            options.append("tensors on a GPU that are written through .data")
        return tuple(sorted((*options, *self._watched.beyond)))

    def _change_after(self, optimizer: Optimizer) -> str:
        name = self._optimizers.get(optimizer, "the optimizer")
        return f"the change of the weights after {name}.step()"

    def after_copy(self, progress: Progress, copied: Collection[Optimizer]) -> Progress:
        """Return the progress of a rank that has copied a step of these optimizers since.

        It lacks that step no more. Where one had stepped in its turn already, the step that was
        lost would have begun another (a loop without a loader): there nothing has moved yet.
        """
        names = {self._optimizers.get(one, "") for one in copied}
        if names & set(progress.stepped):
            return replace(
                progress,
                has_stepped=False,
                lacking=(),
                unknown=(),
                optimizers=(),
                ahead=(),
                is_open=False,
                began=progress.now,
                before=progress.began,
                stepped=(),
            )
        made = self._stepped(self._marked())
        return replace(
            progress,
            lacking=tuple(name for name in progress.lacking if name not in made),
            optimizers=tuple(name for name in progress.optimizers if name not in made),
        )

    def _is_moved_here(self, name: str, history: History) -> bool:
        """Return whether this cell moves it, and not an older one alone: it did, or names it."""
        if self._reached is None or (history.moved or 0) >= self._first_turn:
            return True
        if is_option(name):  # to name its optimizer is not to set it
            return self._is_stored(name)
        root = re.split(r"[.[]", name)[0]
        return root in self._reached or root not in keep.here.names()

    def _may_follow(self, name: str) -> bool:
        """Return whether the cell's code may change what has never moved.

        Of numbers the code says it; of tensors it does not.
        """
        if not self._is_there(name) or not self._is_moved_here(name, self._history[name]):
            return False
        if name in self._marks or self._stored is None:
            return name not in self._optimizers.values()
        return name not in self._set_by_loops and self._is_stored(name)

    def _is_stored(self, name: str) -> bool:
        """Return whether the cell's code may set a number of this name."""
        return self._stored is None or stored_as(name) in self._stored

    def _is_there(self, name: str) -> bool:
        return name in self._marks or bool(self._numbers and name in self._numbers[-1])

    def moving(self) -> list[str]:
        """Return the names of what moves with the steps, or may: numbers aside."""
        return [
            name
            for name in self._objects
            if (known := self._history.get(name)) is None
            or known.moved is not None
            or known.born >= self._turn - 1
        ]

    def optimizers(self) -> dict[Optimizer, str]:
        """Return the optimizers that were found, with the names that lead to them."""
        return dict(self._optimizers)

    def numbers_now(self) -> dict[str, Number]:
        """Return all numbers as they are, and lists' lengths as `run_again` leaves them.

        Without those that the loops of the cell set that failed last.
        """
        numbers = self._watched.read() | self._watched.lists.lengths_to_be()
        return {n: value for n, value in numbers.items() if n not in self._set_by_failed}

    def lists_now(self) -> dict[str, list[Any]]:
        """Return the lists that are followed, by the paths that lead there now.

        Without those that the loops of the cell set that failed last.
        """
        found = self._watched.lists.living(keep.here.names())
        own = self._set_by_failed
        return {path: one for path, one in found if re.split(r"[.[]", path)[0] not in own}

    def moving_names(self) -> frozenset[str]:
        """Return the names of all that is known to move with the steps."""
        moved = {name for name, history in self._history.items() if history.moved is not None}
        return self._moved_elsewhere | moved

    def hand_over(self) -> "Handed":
        """Return what a new rank must know to run a cell again."""
        return Handed(self._watched.lists.lengths_to_be(), self._set_by_failed, self.moving_names())

    def take_over(self, handed: "Handed") -> None:
        """Know, in a new rank, what `hand_over` told on the rank that it was cloned from."""
        self._watched.lists.go_back(handed.lengths)
        self._set_by_failed, self._moved_elsewhere = handed.set_by_failed, handed.moving

    def counts_of_loops(self) -> tuple[str, ...]:
        """Return the numbers that loops themselves set again in each turn, as by `enumerate`."""
        history = self._history
        return tuple(
            name
            for name in self._watched.read()
            if name in self._set_by_failed
            and name in history
            and history[name].least == 1
            and history[name].most <= 2
        )

    def numbers(self) -> dict[str, Number]:
        """Return all numbers as this turn began: which of them move with steps may show later."""
        return dict(self._numbers[-1]) if self._numbers else self._watched.read()

    def put_numbers(self, values: Mapping[str, Number]) -> None:
        """Give numbers these values, where their names still lead to numbers."""
        self._watched.put(values)

    def run_again(self) -> None:
        """Cut lists back, for the cell that a fault has ended goes on from its last step."""
        self._watched.lists.cut(keep.here.names())

    def position(self) -> tuple[int, dict[str, History]]:
        """Return the turn that runs and what is known of moves, for `stand_at`. Never changed."""
        return self._turn, dict(self._history)

    def go_back(
        self, numbers: Mapping[str, Number], position: tuple[int, dict[str, History]]
    ) -> None:
        """Stand where this rank did, with the numbers of then where they move with the steps."""
        moved = set(self._moved(self._now())) | {
            n for n, h in self._history.items() if h.moved is not None
        }
        moved -= self._set_by_loops
        self.put_numbers({n: value for n, value in numbers.items() if n in moved})
        self.stand_at(position)

    def stand_at(self, position: tuple[int, dict[str, History]]) -> None:
        """Stand where another rank does, or this one did."""
        self._turn, self._history = position[0], dict(position[1])
        self._open()
