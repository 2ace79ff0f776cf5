"""Give a new rank's groups the names that cells have given them.

`mine = dist.new_group(...)` is another group on each rank, and outside of it a mark that torch has
for non-members. A new rank gets one rank's namespace: neither that rank's group nor its mark says
anything about the new rank, even where it is in that group. What its predecessor had under the name
was written down (`group_record`) and counts first; else living members know. An unknown group is
a placeholder, whose use is an error: a collective on torch's mark would do nothing, silently, and
one on another group would meet other ranks.

Searched are names of cells, and elements of short lists and dicts. Main thread only.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.kernel import cell_code
from nbdist.engine.kernel.placeholder import Placeholder

# "mine", "pairs[1]" or "by_axis['dp']": the group's name and its ranks; None for torch's mark.
Names = dict[str, list[Any] | None]

_LONGEST = 1024  # elements of a list or dict that is looked through
_UNKNOWN = Placeholder("a process group", "it is unknown which one this rank had here")


def given(namespace: Mapping[str, Any]) -> Names:
    """Return the names in this rank's cells of the groups that it is in, or not in."""
    keys = {live.group: [live.name, list(live.ranks)] for live in torch_groups.live_groups()}
    names: Names = {}
    for path, _, _, value in _places(namespace):
        if is_mark(value):
            names[path] = None
        elif isinstance(value, dist.ProcessGroup) and value in keys:
            names[path] = keys[value]
    return names


def restore(
    namespace: dict[str, Any], own: Names, others: Iterable[Names]
) -> tuple[set[str], set[str]]:
    """Put this rank's groups where it had them, and torch's mark where it was no member.

    Args:
        namespace: Where cells run on this new rank, as it was cloned.
        own: What `given` returned on this rank's predecessor, as far as that still holds.
        others: What `given` returned on the living ranks.

    Returns:
        The names of which every group and placeholder was found, and those in which a group was
        not. What is a placeholder for something else is in neither.
    """
    mine = {(live.name, live.ranks): live.group for live in torch_groups.live_groups()}
    meant: dict[str, set[dist.ProcessGroup]] = {}
    for names in others:
        for path, key in names.items():
            if key is not None and (group := mine.get((key[0], tuple(key[1])))) is not None:
                meant.setdefault(path, set()).add(group)
    found_whole: dict[str, bool] = {}
    unknown: set[str] = set()
    for path, holder, key, value in list(_places(namespace)):
        came = isinstance(value, dist.ProcessGroup) or is_mark(value)
        if not came and type(value) is not Placeholder:
            continue
        if path in own:
            found = _own(own[path], mine)
        elif path in meant:
            found = next(iter(meant[path])) if len(meant[path]) == 1 else None
        else:
            found = value if came else None  # such as `dist.group.WORLD`, or a number
        name = path.partition("[")[0]
        if found is not None:
            holder[key] = found
        elif came:
            holder[key] = _UNKNOWN
            unknown.add(name)
        found_whole[name] = found_whole.get(name, True) and found is not None
    return {name for name, is_whole in found_whole.items() if is_whole}, unknown


def _own(
    key: list[Any] | None, mine: Mapping[tuple[str, tuple[int, ...]], dist.ProcessGroup]
) -> Any:
    """Return the group in a rank's own note of a name; None where it no longer exists."""
    return dist.GroupMember.NON_GROUP_MEMBER if key is None else mine.get((key[0], (*key[1],)))


def assigned_in(source: str) -> set[str]:
    """Return the names that a cell assigns, or assigns an element of; none where it does not parse.

    Pure.
    """
    cell = cell_code.tree(source)
    if cell is None:
        return set()
    targets = [node for node in ast.walk(cell) if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)}
    return names.union(cell_code.words_of_magics(cell))


def is_mark(value: object) -> bool:
    """Return whether a value is what `new_group` returns to a rank that is not in the group."""
    return type(value) is int and value == dist.GroupMember.NON_GROUP_MEMBER


def _places(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield path, container, key and value of each candidate."""
    for name, value in namespace.items():
        yield name, namespace, name, value
        if type(value) is list and len(value) <= _LONGEST:
            for place, element in enumerate(value):
                yield f"{name}[{place}]", value, place, element
        elif type(value) is dict and len(value) <= _LONGEST and value is not namespace:
            for key, element in value.items():
                yield f"{name}[{key!r}]", value, key, element
