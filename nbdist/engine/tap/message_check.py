"""Compare the two ends of a message before it is sent or received.

gloo ends a process that receives more bytes than it has room for, and leaves the rest of a tensor
unchanged where it receives fewer. So each end first writes what it is about to do into the memory
that the ranks of one host share (`collective_check.py`), then reads what the other end has written
of the same message. No end waits for the other: the second one finds a difference, raises
`MismatchError`, and sends or receives nothing; the first is freed by the rescue that follows. No
data can arrive before both have announced, for a backend sends only to a receive that is there.

Messages meet in the order of their calls, by *lane*: from one rank to another, in one group, with
one tag. Compared are bytes and type. Not compared: a receive from any source in a group of three or
more ranks, nor any later one with its tag on that rank, for it is not known which message it took;
a peer that is over a thousand messages ahead; ranks on another host than rank 0, unless by the
store, where that is enabled.

Threads: a message is announced by the thread that launches it; several may.
"""

import threading
import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from nbdist.engine.tap.collective_check import (
    CONFIRM_S,
    MESSAGES,
    REFUSED,
    WORDS,
    SharedTable,
    describe_payload,
    describe_place,
    fence,
    key_of,
)
from nbdist.engine.tap.collective_check_store import StoreTable
from nbdist.shared.errors import MismatchError
from nbdist.shared.text import name_ranks

MAX_LANES = 4096  # of a group; messages of more are not compared


@dataclass(slots=True, eq=False)
class Lane:
    """The messages from one rank to another that meet in their order."""

    source: int  # global ranks
    to: int
    tag: int
    key: int  # 54 bits, the same on both ends and of no other lane
    number: int = 0  # of the newest message announced here, from 1


class MessageEnd(NamedTuple):
    """One end of a message, as it is announced."""

    dtype: int  # position in `collective_check.DTYPES`
    bytes: int
    place: int  # as `collective_check.Call.place`

    def meets(self, other: "MessageEnd") -> bool:
        """Return whether the two can be ends of one message."""
        return (self.dtype, self.bytes) == (other.dtype, other.bytes)

    def describe(self) -> str:
        """Return e.g. "9 float32 (36 B), cell 7, line 5"."""
        return describe_payload(self.dtype, self.bytes) + describe_place(self.place)


def mismatch(
    lane: Lane, number: int, title: str, sent: MessageEnd, received: MessageEnd
) -> MismatchError:
    """Return the error of a message whose ends differ; `title` is the group in words."""
    with_tag = f" with tag {lane.tag}" if lane.tag else ""
    return MismatchError(
        f"Message #{number}{with_tag} from rank {lane.source} to rank {lane.to} of {title} "
        "differs between its two ends.",
        why=f"{name_ranks([lane.source])} sends {sent.describe()}; "
        f"{name_ranks([lane.to])} receives {received.describe()}.",
        do="receive into a tensor of the size and type that is sent; messages between two ranks "
        "meet in the order of their calls, those of each tag separately.",
    )


class Way(Protocol):
    """A way for the two ends of a message to see each other."""

    def meet(self, lane: Lane, number: int, sends: bool, end: MessageEnd) -> MessageEnd | None:
        """Announce this end of a message; return the other one if the two differ."""

    def take_back(self, lane: Lane, number: int, sends: bool) -> None:
        """Undo `meet`: the message was not launched."""


class SharedWay:
    """Through the memory that ranks of one host share.

    A rank has MESSAGES entries behind those of all ranks' collectives: id, type, bytes, place. The
    id is the lane's key plus the message's number, as in `collective_check`; it is written last.
    """

    def __init__(self, table: SharedTable) -> None:
        self._words = table.words
        self._rank = table.rank
        self._begin = table.messages_at

    def _area(self, rank: int) -> int:
        return self._begin + rank * MESSAGES * WORDS

    def meet(self, lane: Lane, number: int, sends: bool, end: MessageEnd) -> MessageEnd | None:
        """See `Way.meet`."""
        words = self._words
        entry_id = lane.key + number
        at = entry_id % MESSAGES * WORDS
        own = self._area(self._rank) + at
        words[own] = 0
        words[own + 1] = end.dtype
        words[own + 2] = end.bytes
        words[own + 3] = end.place
        words[own] = entry_id
        with fence:  # of two that come at the same time, neither may read before it has written
            pass
        peer = self._area(lane.to if sends else lane.source) + at
        if words[peer] != entry_id or (words[peer + 1], words[peer + 2]) == (end.dtype, end.bytes):
            return None
        time.sleep(CONFIRM_S)
        found, *said = words[peer : peer + 4].tolist()
        if found not in (entry_id, entry_id | REFUSED) or end.meets(other := MessageEnd(*said)):
            return None
        words[own] = entry_id | REFUSED
        return other

    def take_back(self, lane: Lane, number: int, sends: bool) -> None:
        """See `Way.take_back`."""
        self._words[self._area(self._rank) + (lane.key + number) % MESSAGES * WORDS] = 0


class StoreWay:
    """Through the store: one key a message, written by who comes first, removed by the other."""

    def __init__(self, table: StoreTable) -> None:
        self._table = table

    def _key(self, lane: Lane, number: int) -> str:
        return f"{self._table.prefix}/message/{lane.key:x}/{number}"

    def meet(self, lane: Lane, number: int, sends: bool, end: MessageEnd) -> MessageEnd | None:
        """See `Way.meet`."""
        store, key = self._table.store, self._key(lane, number)
        own = f"{sends:d} {end.dtype} {end.bytes} {end.place}"
        said = bytes(store.compare_set(key, "", own)).decode()
        who, *words = map(int, said.split())
        if who == sends:
            return None  # the first end; or the same one again, after the backend refused it
        other = MessageEnd(*words)
        if not end.meets(other):
            return other
        store.deleteKey(key)
        return None

    def take_back(self, lane: Lane, number: int, sends: bool) -> None:
        """See `Way.take_back`."""
        self._table.store.deleteKey(self._key(lane, number))


class Messages:
    """One group's messages, to and from this rank."""

    __slots__ = ("_any", "_group", "_lanes", "_lock", "_members", "_rank", "_title", "_way")

    def __init__(
        self, way: Way, rank: int, group: str, title: str, members: tuple[int, ...]
    ) -> None:
        self._way = way
        self._rank = rank
        self._group = group  # names it on all ranks
        self._title = title
        self._members = members
        self._lanes: dict[tuple[bool, int, int, bool], Lane] = {}
        self._any: set[tuple[int, bool]] = set()  # tags received from any source
        self._lock = threading.Lock()

    def announce(
        self, sends: bool, peer: int | None, tag: int, is_second: bool, end: MessageEnd
    ) -> tuple[Lane, int] | None:
        """Announce a message that is about to be launched, and compare it with its other end.

        Args:
            sends: Whether it goes from here.
            peer: The other end's global rank; None: any source.
            tag: Its tag, 0 where the backend knows none.
            is_second: It uses the group's second backend, and matches no message of the first.
            end: This one.

        Returns:
            What `withdraw` takes; None when nothing was announced.

        Raises:
            MismatchError: The other end announced something else; nothing may be launched.
        """
        if peer is None and len(self._members) == 2:
            peer = self._members[self._members[0] == self._rank]
        with self._lock:
            if peer is None:
                self._any.add((tag, is_second))
                return None
            lane = self._lane(sends, peer, tag, is_second)
            if lane is None or (not sends and (tag, is_second) in self._any):
                return None
            lane.number = number = lane.number + 1
        try:
            other = self._way.meet(lane, number, sends, end)
        except BaseException:
            self.withdraw((lane, number))
            raise
        if other is None:
            return lane, number
        lane.number -= 1
        sent, received = (end, other) if sends else (other, end)
        raise mismatch(lane, number, self._title, sent, received)

    def withdraw(self, message: tuple[Lane, int]) -> None:
        """Withdraw an announced message that was not launched: the backend refused it."""
        lane, number = message
        self._way.take_back(lane, number, lane.source == self._rank)
        with self._lock:
            lane.number -= 1

    def _lane(self, sends: bool, peer: int, tag: int, is_second: bool) -> Lane | None:
        known = (sends, peer, tag, is_second)
        lane = self._lanes.get(known)
        if lane is None and len(self._lanes) < MAX_LANES:
            source, to = (self._rank, peer) if sends else (peer, self._rank)
            key = key_of(f"{self._group}|{source}>{to}|{tag}|{is_second}")
            lane = self._lanes[known] = Lane(source, to, tag, key)
        return lane


def messages(
    table: SharedTable | StoreTable,
    name: str,
    title: str,
    members: tuple[int, ...],
    incarnation: str,
) -> Messages | None:
    """Return this rank's messages of a group; arguments as `SharedTable.channel`'s."""
    if len(members) < 2 or table.rank not in members:
        return None
    way = SharedWay(table) if isinstance(table, SharedTable) else StoreWay(table)
    return Messages(way, table.rank, f"{name}|{members}|{incarnation}", title, members)
