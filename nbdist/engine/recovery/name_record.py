"""What the store keeps of the names that each rank's cells have made, for whoever takes its place.

A new rank gets the names of a living rank. What only its predecessor held (`if rank == 1: best =
model`) died with it; only the cell that uses it next would miss it, perhaps hours later, by a
NameError, or by `"best" in globals()` that is False. So at a cell's end each rank writes its names
down where they have changed, and what the replacement rank is without is said. Main thread only.
"""

import json
from collections.abc import Collection, Iterable

from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.compat.groups.torch_groups import TCPStore
from nbdist.engine.group import state

_MOST = 10_000  # names; a rank with more writes none down


def read(client: TCPStore, rank: int) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a process of this rank had at the end of its last cell, and before."""
    if not client.check([_key(rank)]):
        return frozenset(), frozenset()
    default, names, earlier = json.loads(bytes(client.get(_key(rank))))
    if default != torch_groups.default_name():
        return frozenset(), frozenset()
    return frozenset(names), frozenset(earlier)


def missed(before: Collection[str], here: Collection[str], of_source: Collection[str]) -> list[str]:
    """Return the names that a replacement rank is without, and that nothing has taken away. Pure.

    Args:
        before: Those of its predecessor.
        here: Those that it has.
        of_source: Those that the rank it was cloned from had before the last cell, or has: what
            the replacement rank did not get of them that cell has deleted.
    """
    return sorted(set(before) - set(here) - set(of_source))


def _key(rank: int) -> str:
    return f"nbdist/names of rank {rank}"


class WrittenNames:
    """What this rank has written down of its names."""

    def __init__(self) -> None:
        self._written: tuple[str, list[str]] = ("", [])

    def write(self, names: Iterable[str]) -> None:
        """Write down this rank's names, where they have changed since the last cell."""
        here, listed = state.here.place(), sorted(names)
        if here is None or len(listed) > _MOST:
            return
        # A rank that another number of ranks has taken away, and that comes back, has other names.
        new = torch_groups.default_name(), listed
        if new != self._written:
            here.client.set(_key(here.rank), json.dumps([*new, self._written[1]]))
            self._written = new
