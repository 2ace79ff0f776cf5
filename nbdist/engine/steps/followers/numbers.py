"""Read and set the numbers that may move with the steps.

Numbers of the namespace, of the user's own objects and of dicts, options of optimizers but for the
rates that a scheduler sets, and the lengths of lists. Each goes by the name that leads to it.

Main thread.
"""

import itertools
import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeGuard
from weakref import ref

import torch

from nbdist.engine.steps import keep
from nbdist.engine.steps.followers.find_followers import MOST_ITEMS, Found, hold
from nbdist.engine.steps.followers.grown_lists import GrownLists
from nbdist.engine.steps.followers.paths import Paths
from nbdist.engine.steps.followers.tuned_by_hand import MOST_GROUPS

Number = int | float | tuple[int | float, ...]  # options may be tuples, as `betas`
Optimizer = torch.optim.Optimizer

_OF_RANKS = ("rank", "local_rank", "world_size")  # numbers of nbdist's: a scale changes them
_RATES = ("lr", "initial_lr")  # options that a scheduler sets
_OPTION = re.compile(r"\.param_groups\[\d+\]\['\w+'\]$")  # in the name of an option
_ITEM = re.compile(r"\['\w+'\]$")  # in that of a dict's item, too
_MOST_ITEMS = 64  # numbers of dicts


def is_option(name: str) -> bool:
    """Return whether a number's name is that of an optimizer's option."""
    return _OPTION.search(name) is not None


def stored_as(name: str) -> str:
    """Return the name or key, as `['lr']`, under which code sets a number."""
    found = _ITEM.search(name)
    return name.rpartition(".")[2] if found is None else found[0]


class Numbers:
    """The numbers of this rank.

    Attributes:
        lists: Those whose lengths are among them.
        beyond: What is not read, in words: numbers of dicts, by other keys or too many, and lists
            that are too many.
    """

    def __init__(self) -> None:
        self.lists = GrownLists()
        self.beyond: tuple[str, ...] = ()
        self._names: list[str] = []  # in the namespace
        self._places: list[tuple[str, Callable[[], Any]]] = []  # the user's own objects
        self._dicts = Paths()
        self._keys: dict[str, dict[str, str]] = {}  # by path, the names of a dict's numbers by key
        # Options: their names, the optimizer, its group, the key.
        self._options: list[tuple[str, ref[Optimizer], int, str]] = []

    def watch(
        self, found: Found, optimizers: Mapping[Optimizer, str], scheduled: Container[Optimizer]
    ) -> None:
        """Read the numbers of what a search has found, and the options of these optimizers.

        Of those that are `scheduled` all but their rates.
        """
        self._names = [name for name in _numbers_in(keep.here.names(), "") if name not in _OF_RANKS]
        self._places = [(path, hold(owner, path)) for path, owner in found.owners.items()]
        too_many = self.lists.watch(found.lists)
        named = [
            (path, key, f"{path}[{key!r}]")
            for path, held in found.dicts.items()
            for key, value in held.items()
            if type(key) is str and _is_number(value)
        ]
        self._keys = {path: {} for path, _, _ in named[:_MOST_ITEMS]}
        for path, key, name in named[:_MOST_ITEMS]:
            self._keys[path][key] = name
        left_out = set(self._dicts.watch(self._keys))
        left_out |= {path for path, _, _ in named[_MOST_ITEMS:]}
        left_out |= {path for path, held in found.dicts.items() if _has_other_keys(held)}
        self.beyond = (
            *(f"numbers in {path}" for path in sorted(left_out)),
            *(f"what was appended to {path}" for path in sorted(too_many)),
        )
        self._options = [
            (f"{name}.param_groups[{at}][{key!r}]", ref(one), at, key)
            for one, name in optimizers.items()
            for at, group in enumerate(one.param_groups[:MOST_GROUPS])
            for key, value in group.items()
            if _is_setting(value) and not (key in _RATES and one in scheduled)
        ]

    def read(self) -> dict[str, Number]:
        """Return all of them as they are."""
        names = keep.here.names()
        found: dict[str, Number] = {
            n: value for n in self._names if _is_number(value := names.get(n))
        }
        for path, place in self._places:
            if (owner := place()) is not None:
                found |= _numbers_in(vars(owner), f"{path}.")
        for path, held in self._dicts.living(names, dict):
            for key, name in self._keys[path].items():
                if _is_number(value := held.get(key)):
                    found[name] = value
        for name, group, key in self._groups():
            found[name] = group[key]
        return found | self.lists.lengths(names)

    def put(self, values: Mapping[str, Number]) -> None:
        """Give numbers these values, where their names still lead to numbers; lists wait."""
        owners = {path: owner for path, held in self._places if (owner := held()) is not None}
        names = keep.here.names()
        items = {name: (group, key) for name, group, key in self._groups()}
        for path, held in self._dicts.living(names, dict):
            for key, name in self._keys[path].items():
                if _is_number(held.get(key)):
                    items[name] = held, key
        self.lists.go_back(values)
        for name, value in values.items():
            if name in items:
                held, key = items[name]
                held[key] = value
                continue
            path, _, last = name.rpartition(".")
            place = vars(owners[path]) if path in owners else names if not path else None
            if place is not None and _is_number(place.get(last)):
                place[last] = value

    def _groups(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield the numbers of optimizers' groups: name, group and key."""
        for name, held, at, key in self._options:
            if (optimizer := held()) is not None and at < len(optimizer.param_groups):
                group = optimizer.param_groups[at]
                if _is_setting(group.get(key)):
                    yield name, group, key


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) is int or type(value) is float


def _is_setting(value: object) -> TypeGuard[Number]:
    """Return whether an option is a number, or a tuple of numbers."""
    return _is_number(value) or (type(value) is tuple and all(map(_is_number, value)))


def _has_other_keys(held: Mapping[Any, Any]) -> bool:
    """Return whether a dict has numbers under keys that are no strings."""
    some = itertools.islice(held.items(), MOST_ITEMS)
    return any(type(key) is not str and _is_number(value) for key, value in some)


def _numbers_in(names: Mapping[str, Any], prefix: str) -> dict[str, int | float]:
    return {
        prefix + name: value
        for name, value in list(names.items())
        if _is_number(value) and name[:1] != "_"
    }
