"""This process's place in the process group.

Threads: `enter` and `leave` on the main thread; reads on any.
"""

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from nbdist.engine.compat.groups import torch_backends, torch_groups
from nbdist.engine.compat.groups.torch_groups import PrefixStore, Store, TCPStore
from nbdist.engine.group import sockets
from nbdist.engine.group.plan import Key
from nbdist.engine.group.shared_memory import Offered
from nbdist.engine.kernel import location
from nbdist.engine.tap.in_flight import Waiting
from nbdist.engine.tap.interruptible_store import PatientStore
from nbdist.shared.errors import ClusterError
from nbdist.shared.placement import HERE
from nbdist.shared.text import name_ranks

GLOO_THREADS = 2  # per group, as in torch


@dataclass
class GroupState:
    """This process's place in the group."""

    rank: int
    world_size: int
    backend: str
    timeout_s: float
    client: TCPStore
    store: PatientStore
    device: Any  # gloo's
    address: sockets.Address
    generation: int
    host: str = HERE
    leads: bool = True  # it is its host's lowest rank
    check: str = "shared"  # how collectives are compared, see `ClusterOptions`
    offered: Offered | None = None  # memory for announcements, until all have mapped it
    peers: dict[int, sockets.Address] = field(default_factory=dict)  # replaced, never changed
    stale: tuple[Key, ...] = ()
    aborted: bool = False
    held: list[int] = field(default_factory=list)  # descriptors, open until all have aborted
    env_rendezvous: int = 0
    form_limit: timedelta | None = None  # while we form groups; torch's own limit otherwise
    slots: "WeakKeyDictionary[dist.ProcessGroup, int]" = field(default_factory=WeakKeyDictionary)

    def place(self) -> Store:
        """Return this generation's part of the store."""
        # NCCL's own threads use the store as well: they must never wait for Python's lock.
        base = self.client if "nccl" in self.backend else self.store
        return PrefixStore(f"nbdist/{self.generation}", base)

    def make_gloo(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Return a gloo backend with the group's `timeout`, made within `form_limit`."""
        limit = self.form_limit or timeout
        new = torch_backends.make_gloo(store, rank, size, limit, self.device, GLOO_THREADS)
        new._set_default_timeout(timeout)
        return new

    def next_slot(self, group: dist.ProcessGroup) -> int:
        """Return the first backend number that `group` has not used."""
        return self.slots.get(group, torch_backends.FIRST_SLOT)


class Membership:
    """Whether this process is in a group, and its place there."""

    def __init__(self) -> None:
        self._place: GroupState | None = None

    def place(self) -> GroupState | None:
        """Return this process's place, or None while it is in no group."""
        return self._place

    def member(self) -> GroupState:
        """Return this process's place.

        Raises:
            ClusterError: It is in no group.
        """
        if self._place is None:
            raise ClusterError("This process has joined no process group.", do="%dist restart")
        return self._place

    def enter(self, place: GroupState) -> None:
        """Take a place."""
        self._place = place

    def leave(self) -> GroupState | None:
        """Give up the place, and return it."""
        left, self._place = self._place, None
        return left

    def store(self) -> Store:
        """Return this generation's part of the store. Its waits end at an abort."""
        return self.member().place()

    def reforms_left(self) -> int | None:
        """Return how many more times this process's groups can be re-created; None: no limit."""
        if torch_backends.can_release():
            return None
        place = self.member()
        return min(
            (
                (torch_backends.LAST_SLOT + 1 - place.next_slot(live.group))
                // len(torch_backends.backends_of(live.group))
                for live in torch_groups.live_groups()
            ),
            default=torch_backends.LAST_SLOT + 1 - torch_backends.FIRST_SLOT,
        )

    def stale_groups(self) -> list[str]:
        """Return the groups that the last `reform` could not form, e.g. `group 1 (ranks 0-1)`."""
        return [f"group {name} ({name_ranks(ranks)})" for name, ranks in self.member().stale]

    def status(self) -> dict[str, Any]:
        """Return facts for `%dist status`: plain values, no collective, any thread."""
        place = self._place
        if place is None:
            return {"joined": False}
        return {
            "joined": True,
            "rank": place.rank,
            "world_size": place.world_size,
            "backend": place.backend,
            "generation": place.generation,
            "aborted": place.aborted,
            "reforms_left": self.reforms_left(),
            "stale_groups": self.stale_groups(),
            "gloo_address": f"{place.address[0]}:{place.address[1]}",
            "timeout_s": place.timeout_s,
        }

    def waiting_in_store(self) -> Waiting | None:
        """Return the main thread's wait in the store, say in `new_group`. Any thread."""
        place = self._place
        since = None if place is None else place.store.main_waits_since
        if place is None or since is None:
            return None
        cell = location.here.main_thread()
        line = None if cell is None else cell["file_line"]
        seconds = time.monotonic() - since
        return Waiting("store", "", 0, 0, seconds, line, ranks=tuple(range(place.world_size)))


here = Membership()
