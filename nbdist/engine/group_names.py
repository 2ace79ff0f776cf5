"""Give a newcomer's groups the names that cells have given them.

`mine = dist.new_group(...)` is another group on each rank, and outside of it a mark that torch has
for non-members. A newcomer gets one rank's namespace: neither that rank's group nor its mark says
anything of the newcomer. Living members know the name, or what its predecessor had under it was
written down (`group_record`). What nobody knows stays a placeholder, whose use is an error:
a collective on torch's mark would do nothing, silently.

Looked for: names of cells, and elements of lists that are not long. Main thread only.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from nbdist.engine.compat import torch_compat
from nbdist.engine.placeholder import Placeholder

# "mine" or "pairs[1]": the group's name and its ranks; None for torch's mark.
Names = dict[str, list[Any] | None]

_LONGEST = 1024  # elements of a list that is looked through


def given(namespace: Mapping[str, Any]) -> Names:
    """Return what this rank's cells call the groups that it is in, and those that it is not in."""
    keys = {live.group: [live.name, list(live.ranks)] for live in torch_compat.live_groups()}
    names: Names = {}
    for path, _, _, value in _places(namespace):
        if is_mark(value):
            names[path] = None
        elif isinstance(value, dist.ProcessGroup) and value in keys:
            names[path] = keys[value]
    return names


def restore(namespace: dict[str, Any], own: Names, told: Iterable[Names]) -> list[str]:
    """Put this rank's groups where it has none, and torch's mark where it is no member.

    Nothing is put where the ranks mean several groups that this one is in.

    Args:
        namespace: Where cells run on this newcomer, as it was cloned.
        own: What `given` returned on this rank's predecessor.
        told: What `given` returned on the living ranks.

    Returns:
        The names that hold no placeholder any more.
    """
    mine = {(live.name, live.ranks): live.group for live in torch_compat.live_groups()}
    meant: dict[str, set[dist.ProcessGroup]] = {}
    for names in told:
        for path, key in names.items():
            if key is not None and (group := mine.get((key[0], tuple(key[1])))) is not None:
                meant.setdefault(path, set()).add(group)
    touched: dict[str, bool] = {}  # by name: whether it is whole
    for path, holder, key, value in list(_places(namespace)):
        if type(value) is not Placeholder:
            continue
        found = _found(path, own, mine, meant)
        if found is not None:
            holder[key] = found
        name = path.partition("[")[0]
        touched[name] = touched.get(name, True) and found is not None
    return [name for name, is_whole in touched.items() if is_whole]


def _found(
    path: str,
    own: Names,
    mine: Mapping[tuple[str, tuple[int, ...]], dist.ProcessGroup],
    meant: Mapping[str, set[dist.ProcessGroup]],
) -> Any:
    """Return this rank's group of a name, or torch's mark; None where nobody knows it."""
    groups = meant.get(path, set())
    if len(groups) == 1:
        return next(iter(groups))
    if groups or path not in own:
        return None
    key = own[path]
    return dist.GroupMember.NON_GROUP_MEMBER if key is None else mine.get((key[0], (*key[1],)))


def is_mark(value: object) -> bool:
    """Return whether a value is what `new_group` returns to a rank that is not in the group."""
    return type(value) is int and value == dist.GroupMember.NON_GROUP_MEMBER


def _places(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield path, container, key and value of all that is looked at."""
    for name, value in namespace.items():
        yield name, namespace, name, value
        if type(value) is list and len(value) <= _LONGEST:
            for place, element in enumerate(value):
                yield f"{name}[{place}]", value, place, element
