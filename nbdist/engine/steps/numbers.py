"""Read and set the numbers that may move with the steps: variables, attributes, options, lengths.

Numbers of the namespace and of the user's own objects, options of optimizers but for the rates that
a scheduler sets, and the lengths of lists. Each goes by the name that leads to it.

Main thread.
"""

import re
from collections.abc import Callable, Container, Mapping
from typing import Any, TypeGuard
from weakref import ref

import torch

from nbdist.engine.steps import keep
from nbdist.engine.steps.find_followers import Found, hold
from nbdist.engine.steps.grown_lists import GrownLists
from nbdist.engine.steps.tuned_by_hand import MOST_GROUPS

Number = int | float
Optimizer = torch.optim.Optimizer

_OF_RANKS = ("rank", "local_rank", "world_size")  # numbers of nbdist's: a scale changes them
_RATES = ("lr", "initial_lr")  # options that a scheduler sets
_OPTION = re.compile(r"\.param_groups\[\d+\](\['\w+'\])$")  # in the name of an option


def option_key(name: str) -> str | None:
    """Return the key of an option, as `['lr']`, from its name; None for other numbers."""
    found = _OPTION.search(name)
    return None if found is None else found[1]


class Numbers:
    """The numbers of this rank."""

    def __init__(self) -> None:
        self.lists = GrownLists()
        self._names: list[str] = []  # in the namespace
        self._places: list[tuple[str, Callable[[], Any]]] = []  # the user's own objects
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
        self.lists.watch(found.lists)
        self._options = [
            (f"{name}.param_groups[{at}][{key!r}]", ref(one), at, key)
            for one, name in optimizers.items()
            for at, group in enumerate(one.param_groups[:MOST_GROUPS])
            for key, value in group.items()
            if _is_number(value) and not (key in _RATES and one in scheduled)
        ]

    def read(self) -> dict[str, Number]:
        """Return all of them as they are."""
        names = keep.here.names()
        found = {n: value for n in self._names if _is_number(value := names.get(n))}
        for path, place in self._places:
            if (owner := place()) is not None:
                found |= _numbers_in(vars(owner), f"{path}.")
        found |= self.lists.lengths(names)
        return found | {name: group[key] for name, (group, key) in self._groups().items()}

    def put(self, values: Mapping[str, Number]) -> None:
        """Give numbers these values, where their names still lead to numbers; lists wait."""
        owners = {path: owner for path, held in self._places if (owner := held()) is not None}
        names, options = keep.here.names(), self._groups()
        self.lists.go_back(values)
        for name, value in values.items():
            if name in options:
                group, key = options[name]
                group[key] = value
                continue
            path, _, last = name.rpartition(".")
            place = vars(owners[path]) if path in owners else names if not path else None
            if place is not None and _is_number(place.get(last)):
                place[last] = value

    def _groups(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return where the numbers of optimizers' groups are: group and key, by name."""
        found = {}
        for name, held, at, key in self._options:
            if (optimizer := held()) is not None and at < len(optimizer.param_groups):
                group = optimizer.param_groups[at]
                if _is_number(group.get(key)):
                    found[name] = group, key
        return found


def _is_number(value: object) -> TypeGuard[Number]:
    return type(value) is int or type(value) is float


def _numbers_in(names: Mapping[str, Any], prefix: str) -> dict[str, Number]:
    return {
        prefix + name: value
        for name, value in list(names.items())
        if _is_number(value) and name[:1] != "_"
    }
