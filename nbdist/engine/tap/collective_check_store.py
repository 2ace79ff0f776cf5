"""Announce collectives through the store: slower than shared memory, for ranks on any host.

Before a collective is sent, each rank writes what it is about to launch into the TCPStore, waits
until all members of the group have done so, and compares. A collective so waits for its peers
before it begins, also one that was to be asynchronous, and costs some round trips to the store:
switched on to find a mistake, and off again.

Ranks must come to the collectives of all their groups in one order: with two groups in different
orders they would wait for each other here, as they may in NCCL.

Threads: the one that launches. A wait ends with `group.abort`, like every wait in the store.
"""

from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b

from nbdist.engine.tap.collective_check import SPLIT, CollectiveCall, mismatch
from nbdist.engine.tap.interruptible_store import PatientStore
from nbdist.engine.tap.purpose import UNKNOWN, Purpose


class StoreTable:
    """The announcements of all ranks in one generation."""

    def __init__(self, store: PatientStore, rank: int, generation: int, timeout: timedelta) -> None:
        """Announce as `rank`; peers are waited for as long as `timeout`."""
        self.store = store
        self.rank = rank
        self.prefix = f"nbdist/{generation}/calls"
        self.timeout = timeout

    def channel(
        self, name: str, title: str, members: Sequence[int], incarnation: str
    ) -> "StoreChannel | None":
        """Return this rank's way to announce; as `collective_check.Table.channel`."""
        if len(members) < 2 or self.rank not in members:
            return None
        text = f"{name}|{tuple(members)}|{incarnation}"
        digest = blake2b(text.encode(), digest_size=8).hexdigest()
        return StoreChannel(self, digest, title, tuple(members))


class StoreChannel:
    """One group's announcements."""

    def __init__(self, table: StoreTable, group: str, title: str, members: tuple[int, ...]) -> None:
        self._table = table
        self._group = group
        self._title = title
        self._members = members
        self._tries = 0  # of the number that comes next, which were announced and not sent
        self._written = ""

    def announce(
        self,
        number: int,
        call: int,
        size: int,
        size_bytes: int,
        place: int,
        purpose: Purpose = UNKNOWN,
        splits: Sequence[int] = (),
    ) -> None:
        """Write what this rank is about to launch, and compare it with all peers.

        Args:
            number: The collective's, in the group, from 1.
            call: As in `collective_check.Channel.announce`, like the rest.
            size: See `call`.
            size_bytes: See `call`.
            place: See `call`.
            purpose: See `call`.
            splits: See `call`.

        Raises:
            MismatchError: Another rank calls something else; no rank sends anything.
            ReleasedError: `group.abort` was called meanwhile.
            DistStoreError: A peer did not come in time.
        """
        table = self._table
        place_in_order = f"{table.prefix}/{self._group}/{number}.{self._tries}"
        keys = [f"{place_in_order}/{rank}" for rank in self._members]
        own = f"{place_in_order}/{table.rank}"
        said = (call, SPLIT if splits else size, size_bytes, place, purpose.key, *splits)
        table.store.set(own, " ".join(map(str, said)))
        table.store.wait(keys, table.timeout)
        # A rank that has come here has read all earlier announcements.
        before, self._written = self._written, own
        if before:
            table.store.deleteKey(before)
        texts = table.store.multi_get(keys)
        calls = {
            rank: _read(bytes(text).decode())
            for rank, text in zip(self._members, texts, strict=True)
        }
        error = mismatch(self._title, number, self._members, calls, purpose)
        if error is not None:
            self._tries += 1
            raise error
        self._tries = 0

    def withdraw(self, number: int) -> None:
        """Withdraw an announcement that was never sent: the backend refused it.

        The next try has the same number, and is compared with peers that have made as many tries.
        """
        self._tries += 1


def _read(text: str) -> CollectiveCall:
    call, size, size_bytes, place, purpose, *splits = map(int, text.split())
    return CollectiveCall(call, size, size_bytes, place, purpose, tuple(splits))
