"""Know what moves with the steps beside models: schedulers, averages, scalers, counters.

`find_followers` finds what that may be. It is watched here, and so are numbers of the namespace, of
the user's own objects, and the *options* of optimizers without a scheduler. A *turn* goes from one
batch of the trained loader to the next (without a loader: to the next step of an optimizer that has
stepped in it). Where a turn begins, each of these is *marked*: a few of its numbers, and the
versions of its tensors. What two marks tell apart has moved in that turn, and the turns between
moves tell in which it is *due* again. A fault in a turn whose optimizer has stepped then leaves
*lacking* what is due and has not moved: the step is half done. In a cell's first turn no move may
show what follows: what its code sets is then *unknown*.

Main thread.
"""

import ast
import dis
import itertools
import re
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from nbdist.engine.compat import torch_live, torch_modules
from nbdist.engine.kernel import cell_code
from nbdist.engine.steps import keep
from nbdist.engine.steps.find_followers import (
    MOST_ITEMS,
    PLAIN,
    Found,
    has_state,
    hold,
    is_users,
    loose_schedulers,
    loose_tensors,
    search,
)
from nbdist.engine.steps.grown_lists import GrownLists, is_length
from nbdist.engine.steps.tuned_by_hand import MOST_GROUPS, TunedByHand
from nbdist.engine.steps.written_weights import WrittenWeights

Optimizer = torch.optim.Optimizer
Number = int | float
Mark = tuple[object, ...]
_Now = tuple[dict[str, Mark], dict[str, Number]]  # marks, and numbers

_MOST_LEAVES = 32  # numbers and tensors in a mark
_MOST_TENSORS = 12
_MOST_VALUES = 4  # tensors of a mark that are looked into: `.data` writes without a new version
_KEPT_TURNS = 3
_OF_RANKS = ("rank", "local_rank", "world_size")  # numbers of nbdist's: a scale changes them
_OPTION = re.compile(r"\.param_groups\[\d+\](\['\w+'\])$")  # in the name of an option


@dataclass(frozen=True, slots=True)
class History:
    """When something has moved, in turns.

    Attributes:
        born: The turn in which it was found.
        moved: The last in which it has moved; None: never.
        least: Turns between two moves, and the most; 0 before the first.
        beside: The names of the optimizers that have stepped in the turn of its last move.
    """

    born: int
    moved: int | None = None
    least: int = 0
    most: int = 0
    beside: frozenset[str] = frozenset()

    def after_move(self, turn: int, beside: frozenset[str] = frozenset()) -> "History":
        """Return this with a move in `turn`, in which the optimizers of these names stepped."""
        gap = turn - self.born + 1 if self.moved is None else turn - self.moved
        least = min(self.least or gap, gap) if self.moved is not None or not self.least else gap
        return replace(self, moved=turn, least=least, most=max(self.most, gap), beside=beside)

    def is_due(self, turn: int, stepped: frozenset[str] = frozenset()) -> bool:
        """Return whether it should move in `turn`; of what was found in it, nobody can tell.

        It moves with its optimizers: where none of them is among those that have `stepped`, never.
        """
        if self.moved is None:
            return turn == self.born and not self.beside
        if self.beside and not self.beside & stepped:
            return False
        return self.least <= turn - self.moved <= self.most

    def is_regular(self, turn: int) -> bool:
        """Return whether what is due in `turn` moves in it for certain, and not now and then."""
        return self.moved is not None and (self.least == self.most or turn - self.moved == 1)


def _keep_nothing() -> None:
    """Stand for whoever keeps what follows the steps, where nobody recovers."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come in the turn that a fault has ended. Plain, but for its numbers.

    Attributes:
        has_stepped: An optimizer has stepped in it.
        lacking: What is due, has not moved, and should have, where one has.
        unknown: What may be lacking: the cell may change it, and no turn before shows when.
        optimizers: Of what is lacking: nothing can be made up for them once gradients are gone.
        ahead: What moves with the steps and has moved though none has stepped.
        did: What has moved with the newest step: in this turn, or in the one before it.
        kinds: Of all that is followed, the class; of numbers, "".
        began: The numbers that move with the steps, as this turn began.
        before: The same as the turn before began.
        now: The same as they are.
        stepped: The optimizers that have stepped in it.
        written: What the loop changes in weights after a step, where it does.
    """

    has_stepped: bool = False
    lacking: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()
    did: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    began: Mapping[str, Number] = field(default_factory=dict)
    before: Mapping[str, Number] = field(default_factory=dict)
    now: Mapping[str, Number] = field(default_factory=dict)
    stepped: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


class Stepped(Protocol):
    """What an optimizer has done.

    Attributes:
        whole: Steps.
        opened: For `Followers`: the turn of the last one, as often as turns had begun.
    """

    whole: int
    opened: int


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
        self._names: list[str] = []  # of numbers, in the namespace
        self._places: list[tuple[str, Callable[[], Any]]] = []  # of numbers: the user's own objects
        # Options that no scheduler sets: their names, the optimizer, its group, the key.
        self._tuned: list[tuple[str, ref[Optimizer], int, str]] = []
        self._marks: dict[str, Mark] = {}
        self._numbers: deque[dict[str, Number]] = deque(maxlen=_KEPT_TURNS)
        self._history: dict[str, History] = {}
        self._look_at = 0
        self._source: ref[object] | None = None  # which gave the newest batch
        self._trained_on: WeakSet[Any] = WeakSet()
        self._due: list[Callable[[], None]] = []
        self._set_by_loops: frozenset[str] = frozenset()
        self._is_by_loader = False  # the turn began with a batch, or with the end of a loop
        self._reached: frozenset[str] | None = None  # names that the cell leads to; None: any
        self._stored: frozenset[str] | None = None  # names that its code sets; None: any
        self._first_turn = 1  # of the cell
        self._begins_with_cell = False  # the turn, and no loader has given a batch since
        self._keep: Callable[[], Any] = _keep_nothing
        self._kept: tuple[int, Any] = 0, None
        self._written = WrittenWeights()
        self._by_hand = TunedByHand()
        self._lists = GrownLists()

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
            self._lists.stay()
        self._set_by_loops = loop_targets(source)
        self._reached = self._stored = None
        if is_failed:
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
        """Note the numbers anew: what comes before the cell's first loop is no part of its turn.

        Objects are noted as an optimizer steps, for a scaler makes its numbers in the forward.
        """
        self._begins_with_cell, self._is_by_loader = False, True
        self._find_numbers(self._search())
        self._numbers[-1] = self._all_numbers()
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
        self._opened += 1
        self._marks, numbers = now or self._now()
        self._numbers.append(numbers)
        for name in itertools.chain(self._marks, numbers):
            if name not in self._history:
                self._history[name] = History(self._turn)

    def _now(self) -> _Now:
        return self._marked(), self._all_numbers()

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

    def _all_numbers(self) -> dict[str, Number]:
        """Return the numbers of the namespace and the user's own objects, lengths, and options."""
        names = keep.here.names()
        found = {
            name: value
            for name in self._names
            if type(value := names.get(name)) is int or type(value) is float
        }
        for path, place in self._places:
            if (owner := place()) is not None:
                found |= _numbers_in(vars(owner), f"{path}.")
        found |= self._lists.lengths(names)
        return found | {name: group[key] for name, (group, key) in self._options().items()}

    def _options(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return where the numbers of optimizers' groups are: group and key, by name."""
        found = {}
        for name, held, at, key in self._tuned:
            if (optimizer := held()) is not None and at < len(optimizer.param_groups):
                group = optimizer.param_groups[at]
                if type(value := group.get(key)) is int or type(value) is float:
                    found[name] = group, key
        return found

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
                self._history[name] = History(self._turn)
                self._marks[name] = mark(one)
        for optimizer, name in self._optimizers.items():
            self._marks.setdefault(name, self._count(optimizer))
            self._history.setdefault(name, History(self._turn))
        if self._numbers:
            began, now = self._numbers[-1], self._all_numbers()
            for name in [n for n in began if n not in now and _OPTION.search(n)]:
                del began[name]  # a scheduler sets it
            began.update({n: v for n, v in now.items() if n not in began})
            for name in began:
                self._history.setdefault(name, History(self._turn))

    def _search(self) -> Found:
        return search(keep.here.kept(), keep.here.names(), torch_live.here.live(Optimizer))

    def _find_numbers(self, found: Found) -> None:
        self._names = [name for name in _numbers_in(keep.here.names(), "") if name not in _OF_RANKS]
        self._places = [(path, hold(owner, path)) for path, owner in found.owners.items()]
        self._lists.watch(found.lists)
        loose = loose_schedulers(found, found.optimizers.values())
        self._by_hand.watch((*found.followers.values(), *loose.values()))
        self._tuned = [
            (f"{self._optimizers.get(one, name)}.param_groups[{at}][{key!r}]", ref(one), at, key)
            for name, one in found.optimizers.items()
            if not self._by_hand.is_scheduled(one)
            for at, group in enumerate(one.param_groups[:MOST_GROUPS])
            for key, value in group.items()
            if type(value) is int or type(value) is float
        ]

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
        began = self._numbers[-1] if self._numbers else {}
        marked = self._now()
        moved, living = set(self._moved(marked)), self.living()
        stepped = self._stepped(marked[0])
        follows = {n for n, h in self._history.items() if h.moved is not None or n in moved}
        due = {
            name
            for name, history in self._history.items()
            if history.is_due(self._turn, stepped)
            and self._is_there(name)
            and self._is_moved_here(name, history)
        }
        optimizers = set(self._optimizers.values())
        new = set()
        if self._turn == self._first_turn:
            new = {n for n, h in self._history.items() if h.moved is None and self._may_follow(n)}
        numbers = {n for n in follows | new if n in began and n not in self._set_by_loops}
        options = {n for n in due & numbers if _OPTION.search(n) and self._history[n].moved}
        certain = {n for n in options if self._history[n].is_regular(self._turn)}
        # Of other numbers only counters: what is set anew each time lacks nothing.
        known = {n for n in due if n in self._objects or n in optimizers}
        # Of tensors that no object calls its state only those that move with the steps count.
        known = {n for n in known if has_state(living.get(n)) or self._history[n].moved}
        counters = {n for n in due & numbers if type(began[n]) is int and self._history[n].moved}
        if self._is_by_loader:
            known |= counters
        known = (known - options) | certain
        last = {n for n, history in self._history.items() if history.moved == self._turn - 1}
        now = self._all_numbers()
        before = self._numbers[-2] if len(self._numbers) > 1 else {}
        # From a batch on the loop's body runs again, and so does all that it counts.
        ahead = moved - optimizers
        if not self._is_by_loader:
            ahead = {n for n in ahead if n in living or self._history[n].moved is not None}
        lacking = known - moved if self._has_stepped else set()
        # From step to step, what moves before the next one looks like what follows this one.
        unknown = {n for n in (new | options | counters) - known - moved if not is_length(n)}
        for optimizer, is_certain in self._written.missing():
            (lacking if is_certain else unknown).add(self._change_after(optimizer))
        for optimizer, at, is_certain in self._by_hand.missing() if self._has_stepped else ():
            option = f"{self._optimizers.get(optimizer, '')}.param_groups[{at}]['lr']"
            (lacking if is_certain else unknown).add(option)
        return Progress(
            self._has_stepped,
            tuple(sorted(lacking)),
            tuple(sorted(unknown)) if self._has_stepped else (),
            tuple(sorted(lacking & optimizers)),
            () if self._has_stepped else tuple(sorted(ahead - self._set_by_loops)),
            tuple(sorted((moved if self._has_stepped else last) - self._set_by_loops - optimizers)),
            {
                **dict.fromkeys(numbers, ""),
                **dict.fromkeys(optimizers, ""),
                **{n: type(living[n]).__name__ for n in living if n in follows | due | new},
            },
            {n: began[n] for n in sorted(numbers)},
            {n: before[n] for n in sorted(numbers) if n in before},
            {n: now[n] for n in sorted(numbers) if n in now},
            tuple(sorted(stepped)),
            tuple(sorted(map(self._change_after, self._written.written()))),
        )

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
        if _OPTION.search(name):  # to name its optimizer is not to set it
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
        option = _OPTION.search(name)
        last = option[1] if option else name.rpartition(".")[2]
        return self._stored is None or last in self._stored

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

    def numbers(self) -> dict[str, Number]:
        """Return all numbers as this turn began: which of them move with steps may show later."""
        return dict(self._numbers[-1]) if self._numbers else self._all_numbers()

    def put_numbers(self, values: Mapping[str, Number]) -> None:
        """Give numbers these values, where their names still lead to numbers."""
        owners = {path: owner for path, held in self._places if (owner := held()) is not None}
        names, options = keep.here.names(), self._options()
        self._lists.go_back(values)
        for name, value in values.items():
            if name in options:
                group, key = options[name]
                group[key] = value
                continue
            path, _, last = name.rpartition(".")
            place = vars(owners[path]) if path in owners else names if not path else None
            if place is not None and type(place.get(last)) in (int, float):
                place[last] = value

    def run_again(self) -> None:
        """Cut lists back, for the cell that a fault has ended goes on from its last step."""
        self._lists.cut(keep.here.names())

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


def loop_targets(source: str) -> frozenset[str]:
    """Return the names that loops of a cell bind: run again, the cell binds them anew."""
    cell = cell_code.tree(source)
    if cell is None:
        return frozenset()
    targets = [node.target for node in ast.walk(cell) if isinstance(node, ast.For)]
    names = (node for target in targets for node in ast.walk(target))
    return frozenset(node.id for node in names if isinstance(node, ast.Name))


def reached(source: str, names: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names that a cell leads to: its own, and those of functions and classes it names.

    None: not known, for it is no Python.
    """
    cell = cell_code.tree(source)
    if cell is None:
        return None
    todo = {node.id for node in ast.walk(cell) if isinstance(node, ast.Name)}
    todo.update(cell_code.words_of_magics(cell))
    found: set[str] = set()
    while todo:
        found.add(name := todo.pop())
        one = names.get(name)
        of_class = one if isinstance(one, type) else type(one)
        for member in (one, *(vars(of_class).values() if is_users(of_class) else ())):
            todo |= _names_in(getattr(member, "__code__", None)) - found
    return frozenset(found)


def stored(
    source: str, reached: frozenset[str] | None, names: Mapping[str, Any]
) -> frozenset[str] | None:
    """Return the names and attributes that a cell sets, and functions and classes it leads to.

    Of items the keys that it may set, as `['lr']`: those in code that sets items or calls `update`.
    None: not known, for it is no Python.
    """
    cell, code = cell_code.tree(source), cell_code.compiled(source)
    if cell is None or code is None or reached is None:
        return None
    found = _stored_in(code).union(cell_code.words_of_magics(cell))
    for one in map(names.get, reached):
        of_class = one if isinstance(one, type) else type(one)
        for member in (one, *(vars(of_class).values() if is_users(of_class) else ())):
            found |= _stored_in(getattr(member, "__code__", None))
    return frozenset(found)


def _stored_in(code: Any) -> set[str]:
    if not isinstance(code, types.CodeType):
        return set()
    sets = ("STORE_NAME", "STORE_GLOBAL", "STORE_ATTR")
    steps = list(dis.get_instructions(code))
    own = {step.argval for step in steps if step.opname in sets}
    if "update" in code.co_names or any(step.opname == "STORE_SUBSCR" for step in steps):
        keys = (c if isinstance(c, tuple) else (c,) for c in code.co_consts)
        own |= {f"[{key!r}]" for key in itertools.chain(*keys) if isinstance(key, str)}
    return own.union(*map(_stored_in, code.co_consts))


def _names_in(code: Any) -> set[str]:
    if not isinstance(code, types.CodeType):
        return set()
    return set(code.co_names).union(*map(_names_in, code.co_consts))


# ---- Marks --------------------------------------------------------------------------------------


def mark(one: Any) -> Mark:
    """Return what tells a move of an object: a few of its numbers, and the versions of tensors."""
    leaves: list[object] = []
    seen: set[int] = set()
    tensors = values = 0
    todo: list[Any] = [one] if has_state(one) else loose_tensors(one)
    if isinstance(one, torch.amp.GradScaler):
        todo = torch_modules.scaler_tensors(one)  # the rest is of the step that runs
    while todo and len(leaves) < _MOST_LEAVES and tensors < _MOST_TENSORS:
        item = todo.pop()
        kind = type(item)
        if kind in (int, float, bool, str) or item is None:
            leaves.append(item if item == item else "nan")
        elif isinstance(item, torch.Tensor):
            leaves.append((id(item), item._version))
            tensors += 1
            if values < _MOST_VALUES and (value := _first(item)) is not None:
                values += 1
                leaves.append(value)
        elif isinstance(item, (*PLAIN, Optimizer)) or id(item) in seen:
            continue
        else:
            seen.add(id(item))
            todo.extend(reversed(list(itertools.islice(_held(item), MOST_ITEMS))))
    return tuple(leaves)


def _held(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from list(item.values())
    elif isinstance(item, list | tuple | deque):
        yield from item
    elif isinstance(item, nn.Module):
        yield from list(item._buffers.values())
        yield from list(item._parameters.values())
        yield from list(item._modules.values())
        yield from (v for n, v in list(vars(item).items()) if not n.startswith("_"))
    elif hasattr(item, "__dict__"):
        yield from list(vars(item).values())


def _first(tensor: torch.Tensor) -> float | None:
    """Return a tensor's first value where that waits for no device."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.device.type != "cpu" or not tensor.numel() or tensor.layout is not torch.strided:
        return None
    value = tensor.detach()[(0,) * tensor.dim()].item()
    return value if value == value else -1.0


def _numbers_in(names: Mapping[str, Any], prefix: str) -> dict[str, Number]:
    return {
        prefix + name: value
        for name, value in list(names.items())
        if (type(value) is int or type(value) is float) and name[:1] != "_"
    }
