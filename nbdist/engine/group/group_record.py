"""Keep a record of each rank's process groups in the store, for its replacement.

Of a group whose members have all died no living rank knows: to the others it is torch's
mark for non-members. So at a cell's end each rank writes down which groups it is in, how they were
made, and what its cells call them. Main thread only.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.compat.groups.group_spec import GroupSpec
from nbdist.engine.compat.groups.torch_groups import TCPStore
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.group import group_names, state
from nbdist.engine.group.group_names import Names
from nbdist.engine.group.plan import Key, groups_from_json, groups_to_json
from nbdist.engine.steps import keep


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The record of one process, written at the end of its last cell.

    Attributes:
        default: The default group's name.
        group_count: How many groups had been made by then.
        groups: Those that it was in.
        names: What its cells called them.
        cell: Its number.
    """

    default: str
    group_count: int
    groups: dict[Key, GroupSpec]
    names: Names
    cell: int


@dataclass(frozen=True, slots=True)
class SurvivorReport:
    """A living rank's report to new ranks.

    Attributes:
        names: What its cells call its groups.
        cell: The last cell at whose end it has written its record; 0 for none.
        changed: The names that this cell assigns, or has given another meaning here.
    """

    names: Names
    cell: int = 0
    changed: tuple[str, ...] = ()


def read(client: TCPStore, rank: int) -> GroupRecord | None:
    """Return the record of this rank's predecessor; None if there is none."""
    if not client.check([_key(rank)]):
        return None
    default, count, groups, names, cell = json.loads(bytes(client.get(_key(rank))))
    return GroupRecord(default, count, groups_from_json(groups), names, cell)


def names_before(client: TCPStore, rank: int, reports: Iterable[SurvivorReport]) -> Names:
    """Return the names that the predecessor's cells gave its groups, as far as they are known.

    Where groups were made after it was written down, a name may mean one of those; and a cell that
    it did not live to end may have given a name another meaning, as it did on a rank that lives.
    """
    record = read(client, rank)
    if record is None or record.group_count != torch_groups.group_count():
        return {}
    changed = {name for one in reports if one.cell > record.cell for name in one.changed}
    kept = record.names.items()
    return {path: key for path, key in kept if path.partition("[")[0] not in changed}


def _key(rank: int) -> str:
    return f"nbdist/groups of rank {rank}"


class WrittenGroups(Component):
    """Writes the record of this rank's groups when a cell ends."""

    def __init__(self) -> None:
        self._written = ""
        self._cell = 0
        self._names: Names = {}
        self._changed: tuple[str, ...] = ()

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Write this rank's groups down, where there are others than the default one."""
        here, default = state.here.place(), torch_groups.default_name()
        if here is None or not default.isdigit():
            return ()
        count = torch_groups.group_count()
        if count == int(default) + 1 and not self._written:
            return ()  # no other group has been made
        living = torch_groups.live_groups()
        groups = {(g.name, g.ranks): torch_groups.spec_of(g.group) for g in living}
        names, before = group_names.given(keep.here.names()), self._names
        others = [path for path in {**before, **names} if before.get(path, 0) != names.get(path, 0)]
        changed = {path.partition("[")[0] for path in others}
        self._changed = tuple(sorted(changed | group_names.assigned_in(cell.source)))
        self._cell, self._names = cell.number, names
        text = json.dumps([default, count, groups_to_json(groups), names, cell.number])
        if text != self._written:
            here.client.set(_key(here.rank), text)
            self._written = text
        return ()

    def report(self, namespace: Mapping[str, Any]) -> SurvivorReport:
        """Return this living rank's report to new ranks.

        Args:
            namespace: Where cells run, or what of it is cloned.
        """
        return SurvivorReport(group_names.given(namespace), self._cell, self._changed)


here = WrittenGroups()
