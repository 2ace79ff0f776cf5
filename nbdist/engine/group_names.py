"""Give a newcomer's groups the names that cells have given them.

`mine = dist.new_group(...)` is another group on each rank, and outside of it a mark that torch has
for non-members. A newcomer gets one rank's namespace; of groups that this one is not in, others
know the names. Looked for: names of cells, and elements of lists.

Main thread only.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from nbdist.engine.compat import torch_compat
from nbdist.engine.placeholder import Placeholder

Names = dict[str, list[Any]]  # "mine" or "pairs[1]": the group's name and its ranks


def given(namespace: Mapping[str, Any]) -> Names:
    """Return what this rank's cells call the groups that it is in."""
    keys = {live.group: [live.name, list(live.ranks)] for live in torch_compat.live_groups()}
    return {
        path: keys[value]
        for path, _, _, value in _places(namespace)
        if isinstance(value, dist.ProcessGroup) and value in keys
    }


def restore(namespace: dict[str, Any], told: Iterable[Names]) -> list[str]:
    """Put this rank's groups where it has none, and torch's mark where it is no member.

    Nothing is put where the ranks mean several groups that this one is in.

    Args:
        namespace: Where cells run on this newcomer, as it was cloned.
        told: What `given` returned on the living ranks.

    Returns:
        The names that hold no placeholder any more.
    """
    mine = {(live.name, live.ranks): live.group for live in torch_compat.live_groups()}
    meant: dict[str, set[dist.ProcessGroup]] = {}
    for names in told:
        for path, (name, ranks) in names.items():
            group = mine.get((name, tuple(ranks)))
            meant.setdefault(path, set()).update([group] if group is not None else [])
    touched: dict[str, bool] = {}  # by name: whether it is whole
    for path, holder, key, value in list(_places(namespace)):
        is_open = type(value) is Placeholder
        if path in meant and (is_open or is_mark(value)) and len(meant[path]) < 2:
            holder[key] = next(iter(meant[path]), dist.GroupMember.NON_GROUP_MEMBER)
            touched.setdefault(path.partition("[")[0], True)
        elif is_open:
            touched[path.partition("[")[0]] = False
    return [name for name, is_whole in touched.items() if is_whole]


def is_mark(value: object) -> bool:
    """Return whether a value is what `new_group` returns to a rank that is not in the group."""
    return type(value) is int and value == dist.GroupMember.NON_GROUP_MEMBER


def _places(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield path, container, key and value of all that is looked at."""
    for name, value in namespace.items():
        yield name, namespace, name, value
        if type(value) is list:
            for place, element in enumerate(value):
                yield f"{name}[{place}]", value, place, element
