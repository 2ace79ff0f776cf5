"""What the store keeps of each rank's process groups, for whoever takes its place.

Of a group whose members have all died no living rank knows that it was: to the others it is torch's
mark for non-members. So at a cell's end each rank writes down which groups it is in, how they were
made, and what its cells call them. Main thread only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.engine import group_names, membership
from nbdist.engine.compat import torch_compat
from nbdist.engine.compat.torch_compat import TCPStore
from nbdist.engine.group_names import Names
from nbdist.engine.group_spec import Spec
from nbdist.engine.plan import Key, groups_from_json, groups_to_json


@dataclass(frozen=True, slots=True)
class Record:
    """What one process wrote down at the end of its last cell.

    Attributes:
        default: The default group's name.
        group_count: How many groups had been made by then.
        groups: Those that it was in.
        names: What its cells called them.
    """

    default: str
    group_count: int
    groups: dict[Key, Spec]
    names: Names


_written = ""


def write(namespace: Mapping[str, Any]) -> None:
    """Write down this rank's groups, where there are others than the default one.

    Args:
        namespace: Where cells run.
    """
    global _written
    here, default = membership.here(), torch_compat.default_name()
    if here is None or not default.isdigit():
        return
    count = torch_compat.group_count()
    if count == int(default) + 1 and not _written:
        return  # nobody has made one
    groups = {(g.name, g.ranks): torch_compat.spec_of(g.group) for g in torch_compat.live_groups()}
    names = group_names.given(namespace)
    text = json.dumps([default, count, groups_to_json(groups), names])
    if text != _written:
        here.client.set(_key(here.rank), text)
        _written = text


def read(client: TCPStore, rank: int) -> Record | None:
    """Return what the process before this one wrote down as this rank; None for nothing."""
    if not client.check([_key(rank)]):
        return None
    default, count, groups, names = json.loads(bytes(client.get(_key(rank))))
    return Record(default, count, groups_from_json(groups), names)


def names_before(client: TCPStore, rank: int) -> Names:
    """Return what the cells of this rank's predecessor called its groups, as far as that is known.

    Where groups were made after it was written down, a name may mean one of those.
    """
    record = read(client, rank)
    is_current = record is not None and record.group_count == torch_compat.group_count()
    return record.names if record is not None and is_current else {}


def _key(rank: int) -> str:
    return f"nbdist/groups of rank {rank}"
