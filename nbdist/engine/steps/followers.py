"""Know what moves with the steps beside models: schedulers, averages, scalers, counters.

No list of classes says what that is. Whatever a cell's names lead to and that can be put back by
`load_state_dict` is watched, and so are numbers of the namespace and of the user's own objects. A
*turn* goes from one batch of the trained loader to the next (without a loader: to the next step of
an optimizer that has stepped in it). Where a turn begins, each of these is *marked*: a few of its
numbers, and the versions of its tensors. What two marks tell apart has moved in that turn, and the
turns between moves tell in which it is *due* again. A fault in a turn whose optimizer has stepped
then leaves *lacking* what is due and has not moved: the step is half done.

Main thread.
"""

import ast
import itertools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbdist.engine.compat import torch_live, torch_modules
from nbdist.engine.steps import keep

Optimizer = torch.optim.Optimizer
Number = int | float
Mark = tuple[object, ...]
_Now = tuple[dict[str, Mark], dict[str, Number]]  # marks, and numbers

_DEPTH = 4  # attributes and items between a name and what it leads to
_MOST_SEEN = 4000  # objects of a search
_MOST_ITEMS = 64  # of a list or dict, in a search and in a mark
_MOST_LEAVES = 32  # numbers and tensors in a mark
_MOST_TENSORS = 12
_MOST_VALUES = 4  # tensors of a mark that are looked into: `.data` writes without a new version
_KEPT_TURNS = 3
_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


@dataclass(frozen=True, slots=True)
class History:
    """When something has moved, in turns.

    Attributes:
        born: The turn in which it was found.
        moved: The last in which it has moved; None: never.
        least: Turns between two moves, and the most; 0 before the first.
    """

    born: int
    moved: int | None = None
    least: int = 0
    most: int = 0

    def after_move(self, turn: int) -> "History":
        """Return this with a move in `turn`."""
        gap = turn - self.born + 1 if self.moved is None else turn - self.moved
        least = min(self.least or gap, gap) if self.moved is not None or not self.least else gap
        return replace(self, moved=turn, least=least, most=max(self.most, gap))

    def is_due(self, turn: int) -> bool:
        """Return whether it should move in `turn`; of what was found in it, nobody can tell."""
        if self.moved is None:
            return turn == self.born
        return self.least <= turn - self.moved <= self.most


def _keep_nothing() -> None:
    """Stand for whoever keeps what follows the steps, where nobody recovers."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come in the turn that a fault has ended. Plain, but for its numbers.

    Attributes:
        has_stepped: An optimizer has stepped in it.
        lacking: What is due, has not moved, and should have, where one has.
        optimizers: Of what is lacking: nothing can be made up for them once gradients are gone.
        ahead: What moves with the steps and has moved though none has stepped.
        did: What has moved with the newest step: in this turn, or in the one before it.
        kinds: Of all that is followed, the class; of numbers, "".
        began: The numbers that move with the steps, as this turn began.
        before: The same as the turn before began.
        now: The same as they are.
    """

    has_stepped: bool = False
    lacking: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()
    did: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    began: Mapping[str, Number] = field(default_factory=dict)
    before: Mapping[str, Number] = field(default_factory=dict)
    now: Mapping[str, Number] = field(default_factory=dict)


class Followers:
    """What follows the steps on this rank."""

    def __init__(self, counts: Callable[[], Mapping[Optimizer, int]]) -> None:
        """Follow nothing yet.

        Args:
            counts: Returns how many whole steps each optimizer has made.
        """
        self._counts = counts
        self._turn = 1
        self._has_stepped = False
        self._began: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # their counts
        self._objects: dict[str, Callable[[], Any]] = {}
        self._optimizers: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._names: list[str] = []  # of numbers, in the namespace
        self._places: list[tuple[str, Callable[[], Any]]] = []  # of numbers: the user's own objects
        self._marks: dict[str, Mark] = {}
        self._numbers: deque[dict[str, Number]] = deque(maxlen=_KEPT_TURNS)
        self._history: dict[str, History] = {}
        self._look_at = 0
        self._source: ref[object] | None = None  # which gave the newest batch
        self._trained_on: WeakSet[Any] = WeakSet()
        self._due: list[Callable[[], None]] = []
        self._set_by_loops: frozenset[str] = frozenset()
        self._keep: Callable[[], Any] = _keep_nothing
        self._kept: tuple[int, Any] = 0, None

    # -- events

    def gave_batch(self, source: object) -> None:
        """Note a batch of a loader: where it is the trained one, the step before is whole."""
        self._source = ref(source)
        if self._has_stepped and source in self._trained_on:
            self.next_turn()

    def gave_all(self, source: object) -> None:
        """End the turn with its loop: run again, what follows the loop is done again."""
        if self._has_stepped and source in self._trained_on:
            self.next_turn()
            self._kept = self._turn, self._keep()

    def before_step(self, optimizer: Optimizer) -> None:
        """Begin a turn where no loader has: an optimizer steps a second time in it."""
        if self._has_stepped and self._counts().get(optimizer, 0) != self._began.get(optimizer, 0):
            self.next_turn()
        if not self._look_at:
            self._look()

    def after_step(self) -> None:
        """Note that an optimizer has stepped."""
        if not self._has_stepped:
            self._has_stepped = True
            if self._source is not None and (source := self._source()) is not None:
                self._trained_on.add(source)

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
        self._open()

    def end_cell(self, source: str, *, is_failed: bool) -> None:
        """End the last turn of a cell that went well; of one that failed, note its loops' names."""
        self._set_by_loops = loop_targets(source)
        if self._has_stepped and not is_failed:
            self.next_turn()

    def next_turn(self) -> None:
        """End the running turn, for all that belongs to its step is done, and begin another."""
        due, self._due = self._due, []
        now: _Now | None = self._close()
        for do in due:
            do()
        if self._turn >= self._look_at:
            self._look()
            self._look_at = self._turn + min(_MOST_ITEMS, 1 + self._age() // 2)
            now = None
        self._open(now)

    # -- turns

    @property
    def turn(self) -> int:
        """The number of the turn that runs, on this rank."""
        return self._turn

    def _close(self) -> _Now:
        """Note what has moved in the turn that is over; return how all of it stands."""
        now = self._now()
        for name in self._moved(now):
            self._history[name] = self._history[name].after_move(self._turn)
        self._turn += 1
        self._has_stepped = False
        return now

    def _open(self, now: _Now | None = None) -> None:
        self._has_stepped = False
        self._began = WeakKeyDictionary(self._counts())
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
        counts = self._counts()
        return marks | {name: (counts.get(o, 0),) for o, name in self._optimizers.items()}

    def _all_numbers(self) -> dict[str, Number]:
        """Return the numbers of the namespace, and of the user's own objects."""
        names = keep.names()
        found = {
            name: value
            for name in self._names
            if type(value := names.get(name)) is int or type(value) is float
        }
        for path, place in self._places:
            if (owner := place()) is not None:
                found |= _numbers_in(vars(owner), f"{path}.")
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
        found = search(keep.kept(), keep.names(), torch_live.live(Optimizer))
        loose = loose_schedulers(found, [o for o, made in self._counts().items() if made])
        objects = self._as_known({**found.followers, **loose})
        known = {n: held for n, held in self._objects.items() if held() is objects.get(n)}
        self._objects = {n: known.get(n) or _hold(one, n) for n, one in objects.items()}
        names = {o: self._optimizers.get(o, name) for name, o in found.optimizers.items()}
        self._optimizers = WeakKeyDictionary(names)
        self._names = list(_numbers_in(keep.names(), ""))
        self._places = [(path, _hold(owner, path)) for path, owner in found.owners.items()]
        for name, one in objects.items():
            if name not in known:
                self._history[name] = History(self._turn)
                self._marks[name] = mark(one)
        counts = self._counts()
        for optimizer, name in self._optimizers.items():
            self._marks.setdefault(name, (counts.get(optimizer, 0),))
            self._history.setdefault(name, History(self._turn))
        if self._numbers:
            began = self._numbers[-1]
            began.update({n: v for n, v in self._all_numbers().items() if n not in began})
            for name in began:
                self._history.setdefault(name, History(self._turn))

    def _as_known(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was found under the names that it had: a loop may have bound another one."""
        names = {id(one): name for name, one in self.living().items()}
        return {names.get(id(one), name): one for name, one in found.items()}

    # -- after a fault

    def progress(self) -> Progress:
        """Return how far this rank has come in the turn that a fault has ended."""
        began = self._numbers[-1] if self._numbers else {}
        moved, living = set(self._moved(self._now())), self.living()
        follows = {n for n, h in self._history.items() if h.moved is not None or n in moved}
        due = {
            name
            for name, history in self._history.items()
            if history.is_due(self._turn) and self._is_there(name)
        }
        optimizers = set(self._optimizers.values())
        numbers = {n for n in follows if n in began and n not in self._set_by_loops}
        # Of numbers only counters: what is set anew each time lacks nothing.
        known = {n for n in due if n in self._objects or n in optimizers}
        # Of tensors that no object calls its state only those that move with the steps count.
        known = {n for n in known if has_state(living.get(n)) or self._history[n].moved}
        known |= {n for n in due & numbers if type(began[n]) is int and self._history[n].moved}
        last = {n for n, history in self._history.items() if history.moved == self._turn - 1}
        now = self._all_numbers()
        before = self._numbers[-2] if len(self._numbers) > 1 else {}
        ahead = {n for n in moved - optimizers if n in living or self._history[n].moved is not None}
        lacking = known - moved if self._has_stepped else set()
        return Progress(
            self._has_stepped,
            tuple(sorted(lacking)),
            tuple(sorted(lacking & optimizers)),
            () if self._has_stepped else tuple(sorted(ahead - self._set_by_loops)),
            tuple(sorted((moved if self._has_stepped else last) - self._set_by_loops - optimizers)),
            {
                **dict.fromkeys(numbers, ""),
                **dict.fromkeys(optimizers, ""),
                **{n: type(living[n]).__name__ for n in living if n in follows | due},
            },
            {n: began[n] for n in sorted(numbers)},
            {n: before[n] for n in sorted(numbers) if n in before},
            {n: now[n] for n in sorted(numbers) if n in now},
        )

    def without_copied(self, progress: Progress) -> Progress:
        """Return the progress of a rank that has copied steps since: what it lacks no more."""
        counts = self._counts()
        made = {n for o, n in self._optimizers.items() if counts.get(o, 0) != self._began.get(o, 0)}
        return replace(
            progress,
            lacking=tuple(name for name in progress.lacking if name not in made),
            optimizers=tuple(name for name in progress.optimizers if name not in made),
        )

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
        """Return all numbers as they are: which of them move with the steps may show later."""
        return self._all_numbers()

    def put_numbers(self, values: Mapping[str, Number]) -> None:
        """Give numbers these values, where their names still lead to numbers."""
        owners = {path: owner for path, held in self._places if (owner := held()) is not None}
        names = keep.names()
        for name, value in values.items():
            path, _, last = name.rpartition(".")
            place = vars(owners[path]) if path in owners else names if not path else None
            if place is not None and type(place.get(last)) in (int, float):
                place[last] = value  # type: ignore[index]

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
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return frozenset()  # magics of IPython: what they bind is put back, too
    targets = [node.target for node in ast.walk(tree) if isinstance(node, ast.For)]
    names = (node for target in targets for node in ast.walk(target))
    return frozenset(node.id for node in names if isinstance(node, ast.Name))


# ---- What is found ------------------------------------------------------------------------------


@dataclass
class Found:
    """What a search has found, by the names that lead there."""

    followers: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)  # the user's own objects
    seen: set[int] = field(default_factory=set)


def search(
    kept: Mapping[str, Any], names: Mapping[str, Any], optimizers: Iterable[Optimizer]
) -> Found:
    """Return what these names lead to: through attributes, lists and dicts of the user's objects.

    What an optimizer trains is no follower: it is copied and put back as a model.
    """
    found = Found()
    trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    todo = _roots(kept, names)
    while todo and len(found.seen) < _MOST_SEEN:
        path, one, depth = todo.popleft()
        if isinstance(one, _PLAIN) or id(one) in found.seen:
            continue
        found.seen.add(id(one))
        if isinstance(one, Optimizer):
            found.optimizers[path] = one
        elif _is_follower(one, trained):
            found.followers[path] = one
            found.seen |= {id(inner) for inner in _schedulers_in(one)}
        elif depth < _DEPTH:
            todo.extend((f"{path}{step}", item, depth + 1) for step, item in _inside(one))
            if _is_users(type(one)) and hasattr(one, "__dict__"):
                found.owners[path] = one
            elif depth or type(one) not in (dict, list):
                continue
            if loose_tensors(one):
                found.followers[path] = one
    return found


def names_of(
    kept: Mapping[str, Any], names: Mapping[str, Any], known: Callable[[Any], int | None]
) -> dict[int, set[str]]:
    """Return the names that lead to certain objects, as of `search`.

    Args:
        kept: As of `search`.
        names: Likewise.
        known: Returns the id of what an object is, or is around; None: none of them.
    """
    found: dict[int, set[str]] = {}
    seen: set[int] = set()
    todo = _roots(kept, names)
    while todo and len(seen) < _MOST_SEEN:
        path, one, depth = todo.popleft()
        if isinstance(one, _PLAIN):
            continue
        if (which := known(one)) is not None:
            found.setdefault(which, set()).add(path)
        elif depth < _DEPTH and id(one) not in seen:
            seen.add(id(one))
            todo.extend((f"{path}{step}", item, depth + 1) for step, item in _inside(one))
    return found


def _roots(kept: Mapping[str, Any], names: Mapping[str, Any]) -> "deque[tuple[str, Any, int]]":
    """Return where a search begins: names, what they lead to, and how deep that is."""
    own = [
        (name, one)
        for name, one in list(names.items())
        if not name.startswith("_") and name not in ("In", "Out", "exit", "quit")
    ]
    return deque((name, one, 0) for name, one in [*kept.items(), *own])


_PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    torch.Tensor,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)


def _is_follower(one: Any, trained: set[int]) -> bool:
    """Return whether an object has a state of its own that can be put back."""
    kind = type(one)
    if not has_state(one) or isinstance(one, DataLoader):
        return False
    if kind.__module__.partition(".")[0] == "nbdist":
        return False
    if isinstance(one, nn.Module):
        if isinstance(one, FSDPModule):
            return False
        tensors = itertools.chain(one.parameters(), one.buffers())
        return any(True for _ in tensors) and not any(id(p) in trained for p in one.parameters())
    return not isinstance(one, torch.amp.GradScaler) or one.is_enabled()


def _inside(one: Any) -> Iterator[tuple[str, Any]]:
    """Return what an object holds, each with how one gets there."""
    if isinstance(one, dict):
        for key, value in itertools.islice(list(one.items()), _MOST_ITEMS):
            yield f"[{key!r}]", value
    elif isinstance(one, list | tuple):
        for at, value in enumerate(one[:_MOST_ITEMS]):
            yield f"[{at}]", value
    elif _is_users(type(one)) and hasattr(one, "__dict__"):
        for name, value in list(vars(one).items()):
            if not name.startswith("_"):
                yield f".{name}", value


_users: dict[str, bool] = {}


def _is_users(kind: type) -> bool:
    return is_users_module(kind.__module__)


def is_users_module(name: str) -> bool:
    """Return whether code is the user's own: of a cell, or of a module that is not installed."""
    known = _users.get(name)
    if known is None:
        file = getattr(sys.modules.get(name), "__file__", None)
        is_own = name == "__main__" or bool(file and not file.startswith(_INSTALLED))
        known = _users[name] = is_own and name.partition(".")[0] not in ("nbdist", "torch")
    return known


def _schedulers_in(one: Any) -> list[Any]:
    """Return the schedulers inside of another, which its state holds."""
    inner = getattr(one, "_schedulers", None)
    return list(inner) if isinstance(inner, list) else []


def loose_schedulers(found: Found, active: Iterable[Optimizer]) -> dict[str, Any]:
    """Return schedulers and scalers that no name leads to, by class: of optimizers that step."""
    stepped = {id(o) for o in active}
    loose: dict[str, Any] = {}
    living = [*torch_live.live(LRScheduler), *torch_live.live(torch.amp.GradScaler)]
    inner = {id(i) for one in living for i in _schedulers_in(one)}
    for one in living:
        optimizer = getattr(one, "optimizer", None)
        if id(one) in found.seen or id(one) in inner or not _is_follower(one, set()):
            continue
        if optimizer is None or id(optimizer) in stepped:
            kind = type(one).__name__
            nth = sum(type(other) is type(one) for other in loose.values()) + 1
            loose[kind if nth == 1 else f"{kind}-{nth}"] = one
    return loose


def _hold(one: Any, path: str) -> Callable[[], Any]:
    """Return what gives an object as long as it lives: one that no reference takes, by its name."""
    try:
        return ref(one)
    except TypeError:
        number = id(one)

    def named() -> Any:
        there = keep.named().get(path)
        return there if id(there) == number else None

    return named


# ---- States -------------------------------------------------------------------------------------


def has_state(one: Any) -> bool:
    """Return whether an object says itself what its state is."""
    return hasattr(type(one), "state_dict") and hasattr(type(one), "load_state_dict")


def state_of(one: Any) -> Any:
    """Return an object's state: what it says, or the tensors that it holds."""
    return one.state_dict() if has_state(one) else loose_tensors(one)


def loose_tensors(one: Any) -> list[torch.Tensor]:
    """Return the tensors that a user's object, or a list or dict, holds: an average by hand.

    Numbers and what belongs to a graph are none: a loss, an activation.
    """
    found: list[torch.Tensor] = []
    todo: list[tuple[Any, int]] = [(one if isinstance(one, dict | list) else vars(one), 0)]
    while todo:
        item, depth = todo.pop()
        if isinstance(item, torch.Tensor):
            if item.dim() and not item.requires_grad and item.is_floating_point():
                found.append(item)
        elif isinstance(item, dict | list | tuple) and depth < _DEPTH:
            items = list(item.values()) if isinstance(item, dict) else item
            todo.extend((inner, depth + 1) for inner in items)
    return found


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
        elif isinstance(item, (*_PLAIN, Optimizer)) or id(item) in seen:
            continue
        else:
            seen.add(id(item))
            todo.extend(reversed(list(itertools.islice(_held(item), _MOST_ITEMS))))
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
