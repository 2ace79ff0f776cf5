"""Find what may follow the steps: what the names of cells lead to, and has a state to put back.

No list of classes says what that is. From the namespace and what `keep` was given, through
attributes, lists and dicts of the user's own objects: what has `load_state_dict`, objects that hold
tensors, and the objects whose numbers count. Schedulers and scalers of torch are found without a
name too. Pure but for the living objects that it looks at; `followers` watches what is found.
"""

import itertools
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbdist.engine.compat import torch_live
from nbdist.engine.steps import keep

Optimizer = torch.optim.Optimizer

_DEPTH = 4  # attributes and items between a name and what it leads to
_MOST_SEEN = 4000  # objects of a search
MOST_ITEMS = 64  # of a list or dict
_OF_LIST = re.compile(r"\[\d+\]$")  # how the path of a list's item ends
_WITHOUT_NAME = (LRScheduler, torch.amp.GradScaler)
_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


@dataclass
class Found:
    """What a search has found, by the names that lead there."""

    followers: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)  # the user's own objects
    lists: list[str] = field(default_factory=list)  # those of names, attributes and keys
    dicts: dict[str, Any] = field(default_factory=dict)  # likewise; no optimizer's group
    beyond: dict[str, str] = field(default_factory=dict)  # by name, what was not looked at
    seen: set[int] = field(default_factory=set)


def search(
    kept: Mapping[str, Any], names: Mapping[str, Any], optimizers: Iterable[Optimizer]
) -> Found:
    """Return what these names lead to: through attributes, lists and dicts of the user's objects.

    What an optimizer trains is no follower: it is copied and put back as a model.
    """
    found = Found()
    long: dict[str, Any] = {}  # containers of more items than are searched
    trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    todo = _roots(kept, names)
    while todo and len(found.seen) < _MOST_SEEN:
        path, one, depth = todo.popleft()
        if isinstance(one, PLAIN) or id(one) in found.seen:
            continue
        found.seen.add(id(one))
        if isinstance(one, Optimizer):
            found.optimizers[path] = one
        elif _is_follower(one, trained):
            found.followers[path] = one
            found.seen |= {id(inner) for inner in _schedulers_in(one)}
        elif depth < _DEPTH:
            if type(one) is list and not _OF_LIST.search(path):
                found.lists.append(path)
            elif isinstance(one, dict) and not _OF_LIST.search(path):
                found.dicts[path] = one
            if isinstance(one, dict | list | tuple) and len(one) > MOST_ITEMS:
                long[path] = one
            todo.extend((f"{path}{step}", item, depth + 1) for step, item in _inside(one))
            if is_users(type(one)) and hasattr(one, "__dict__"):
                found.owners[path] = one
            elif depth or type(one) not in (dict, list):
                continue
            if loose_tensors(one):
                found.followers[path] = one
    # A loop over an optimizer's groups leaves a name for the last of them.
    groups = {id(group) for o in found.optimizers.values() for group in o.param_groups}
    found.dicts = {path: one for path, one in found.dicts.items() if id(one) not in groups}
    for path, container in long.items():
        if kind := _kind_beyond(container, found.seen, trained):
            found.beyond[path] = (
                f"{path} holds {len(container):,} items, of which {MOST_ITEMS} are searched for "
                f"what follows the steps. Not searched is {kind}: give it to nbdist.keep, so that "
                "it follows them after a fault."
            )
    if left := [path for path, one, _ in todo if not isinstance(one, PLAIN)]:
        in_names = ", ".join(list(dict.fromkeys(re.split(r"[.[]", path)[0] for path in left))[:3])
        found.beyond[""] = (
            f"The search for what follows the steps ends after {_MOST_SEEN:,} objects. Not all "
            f"that is in {in_names} was searched: give averages and the like in it to nbdist.keep, "
            "so that they follow the steps after a fault."
        )
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
        if isinstance(one, PLAIN):
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


PLAIN = (
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


def _kind_beyond(one: Any, seen: set[int], trained: set[int]) -> str:
    """Return the class of the first that should follow beyond a container's searched items.

    Torch's schedulers and scalers are found without a name.
    """
    items = list(one.values()) if isinstance(one, dict) else one
    for item in itertools.islice(items, MOST_ITEMS, _MOST_SEEN):
        if isinstance(item, (*PLAIN, *_WITHOUT_NAME)) or id(item) in seen:
            continue
        if _is_follower(item, trained):
            return type(item).__name__
    return ""


def _inside(one: Any) -> Iterator[tuple[str, Any]]:
    """Return what an object holds, each with how one gets there."""
    if isinstance(one, dict):
        for key, value in itertools.islice(list(one.items()), MOST_ITEMS):
            yield f"[{key!r}]", value
    elif isinstance(one, list | tuple):
        for at, value in enumerate(one[:MOST_ITEMS]):
            yield f"[{at}]", value
    elif is_users(type(one)) and hasattr(one, "__dict__"):
        for name, value in list(vars(one).items()):
            if not name.startswith("_"):
                yield f".{name}", value


def is_users(kind: type) -> bool:
    """Return whether a class is the user's own."""
    return is_users_module(kind.__module__)


@cache
def is_users_module(name: str) -> bool:
    """Return whether code is the user's own: of a cell, or of a module that is not installed."""
    file = getattr(sys.modules.get(name), "__file__", None)
    is_own = name == "__main__" or bool(file and not file.startswith(_INSTALLED))
    return is_own and name.partition(".")[0] not in ("nbdist", "torch")


def _schedulers_in(one: Any) -> list[Any]:
    """Return the schedulers inside of another, which its state holds."""
    inner = getattr(one, "_schedulers", None)
    return list(inner) if isinstance(inner, list) else []


def loose_schedulers(found: Found, active: Iterable[Optimizer]) -> dict[str, Any]:
    """Return schedulers and scalers that no name leads to, by class: of optimizers that step."""
    stepped = {id(o) for o in active}
    loose: dict[str, Any] = {}
    living = [one for kind in _WITHOUT_NAME for one in torch_live.here.live(kind)]
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


def hold(one: Any, path: str) -> Callable[[], Any]:
    """Return what gives an object as long as it lives: one that no reference takes, by its name."""
    try:
        return ref(one)
    except TypeError:
        number = id(one)

    def named() -> Any:
        there = keep.here.named().get(path)
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
