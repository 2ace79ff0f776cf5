"""What ranks tell each other when a generation of the group begins, and what follows from it.

Pure: hellos in, a plan out, the same on every rank.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from nbdist.engine import sockets
from nbdist.engine.shared_memory import Offer

Key = tuple[str, tuple[int, ...]]  # a group's name and its global ranks


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank tells the others when a generation begins."""

    address: sockets.Address  # where its gloo device listens
    groups: tuple[Key, ...]
    group_count: int  # from which the next group's name is made
    memory: Offer | None = None  # for announcements; rank 0's

    def to_json(self) -> str:
        """Return the text that stands in the store."""
        memory = None if self.memory is None else asdict(self.memory)
        return json.dumps([self.address, self.groups, self.group_count, memory])

    @classmethod
    def from_json(cls, text: str | bytes) -> "Hello":
        """Return what `to_json` wrote."""
        (host, port), groups, count, memory = json.loads(text)
        return cls(
            (host, port),
            tuple((name, tuple(ranks)) for name, ranks in groups),
            count,
            None if memory is None else Offer(**memory),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What a generation re-forms, in an order that is the same on every rank."""

    groups: tuple[Key, ...]
    stale: tuple[Key, ...]  # some member no longer has them
    group_count: int


def make_plan(hellos: Mapping[int, Hello]) -> Plan:
    """Return what ranks that said these hellos can form together.

    A group lives on when each of its ranks still has it: a rank that was replaced knows only the
    default group, and a fault in the middle of `new_group` leaves some ranks with it and some
    without.
    """
    order: dict[Key, None] = {}
    for rank in sorted(hellos):
        order.update(dict.fromkeys(hellos[rank].groups))

    def lives(key: Key) -> bool:
        return all(rank in hellos and key in hellos[rank].groups for rank in key[1])

    # Larger groups first, the default one among them; any order will do that all ranks share.
    ordered = sorted(order, key=lambda key: (-len(key[1]), len(key[0]), key))
    return Plan(
        groups=tuple(key for key in ordered if lives(key)),
        stale=tuple(key for key in ordered if not lives(key)),
        group_count=max(hello.group_count for hello in hellos.values()),
    )
