"""The messages of ranks when a generation of the group begins, and the plan made from them.

Pure: hellos in, a plan out, the same on every rank.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nbdist.engine.compat.groups.group_spec import GroupSpec
from nbdist.engine.group import sockets
from nbdist.engine.group.shared_memory import Offer

Key = tuple[str, tuple[int, ...]]  # a group's name and its global ranks


def groups_to_json(groups: Mapping[Key, GroupSpec]) -> list[Any]:
    """Return groups as plain values for JSON."""
    return [(*key, asdict(spec)) for key, spec in groups.items()]


def groups_from_json(values: list[Any]) -> dict[Key, GroupSpec]:
    """Return the groups that `groups_to_json` has packed."""
    return {(name, tuple(ranks)): GroupSpec(**spec) for name, ranks, spec in values}


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's message to the others when a generation begins.

    Attributes:
        address: Where its gloo device listens.
        groups: Those it has; of a new process, those that the one before it had.
        group_count: From which the next group's name is made.
        is_new: Whether its process is new, and has yet to make its groups.
        default: The name of its default group; empty when the program has destroyed it.
        memory: For announcements; of each host's first rank.
        host: Its host.
    """

    address: sockets.Address
    groups: Mapping[Key, GroupSpec]
    group_count: int
    is_new: bool = False
    default: str = "0"
    memory: Offer | None = None
    host: str = ""

    def to_json(self) -> str:
        """Return the text for the store."""
        memory = None if self.memory is None else asdict(self.memory)
        return json.dumps(
            [
                self.address,
                groups_to_json(self.groups),
                self.group_count,
                self.is_new,
                self.default,
                memory,
                self.host,
            ]
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> "Hello":
        """Parse what `to_json` wrote."""
        (address, port), groups, count, is_new, default, memory, host = json.loads(text)
        return cls(
            (address, port),
            groups_from_json(groups),
            count,
            is_new,
            default,
            None if memory is None else Offer(**memory),
            host,
        )


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The groups that a generation forms, in the same order on every rank.

    Attributes:
        groups: The groups, including the default one.
        stale: Groups that some member no longer has.
        group_count: From which the next group's name is made.
        default: The name of the default group.
        is_replaced: A rank no longer has one: all leave their groups, and make this one.
    """

    groups: Mapping[Key, GroupSpec]
    stale: tuple[Key, ...]
    group_count: int
    default: str
    is_replaced: bool = False


def make_plan(hellos: Mapping[int, Hello]) -> GroupPlan:
    """Return the groups that ranks with these hellos can form together.

    A group lives on when each of its ranks still has it, or is new and makes it. A fault in the
    middle of `new_group` leaves some ranks with it and some without. Where a rank has no default
    group, or another one, no group lives on: all are made from the default one. What a new process
    knows of its predecessor counts where that one had the same default group.
    """

    def lives(key: Key) -> bool:
        return all(
            rank in hellos and (hellos[rank].is_new or key in hellos[rank].groups)
            for rank in key[1]
        )

    count = max(hello.group_count for hello in hellos.values())
    everyone = tuple(sorted(hellos))
    asked = [hello for hello in hellos.values() if not hello.is_new] or list(hellos.values())
    default = asked[0].default
    if any(hello.default != default for hello in asked) or not lives((default, everyone)):
        return GroupPlan({}, (), count, str(count), is_replaced=True)

    known: dict[Key, GroupSpec] = {}
    # A new rank knows less of the default group than the others.
    for rank in sorted(hellos, key=lambda rank: (hellos[rank].is_new, rank)):
        hello = hellos[rank]
        if not hello.is_new or hello.default == default:
            known = dict(hello.groups) | known
    # Larger groups first, the default one before all; any order that all ranks share is right.
    ordered = sorted(known, key=lambda key: (-len(key[1]), len(key[0]), key))
    return GroupPlan(
        groups={key: known[key] for key in ordered if lives(key)},
        stale=tuple(key for key in ordered if not lives(key)),
        group_count=count,
        default=default,
    )
