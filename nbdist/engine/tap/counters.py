"""Count the collectives and messages of each process group, messages by peer.

Numbers begin at 1 with each generation of the groups. Messages (send, recv) are numbered for each
peer and direction, never among the collectives: ranks of a group send different numbers of them.
Each has a number among those of its tag beside it: receives with other tags may be launched in
another order than the sends that they meet.

Threads: a book is written by the thread that launches; counts may be read on any.
"""

import os
from collections import Counter
from collections.abc import Iterable
from weakref import WeakSet, ref

import torch.distributed as dist

from nbdist.engine.compat import torch_hooks
from nbdist.engine.compat.groups import torch_backends, torch_groups
from nbdist.engine.tap.collective_check import CheckChannel, SharedTable
from nbdist.engine.tap.collective_check_store import StoreChannel, StoreTable
from nbdist.engine.tap.message_check import Messages, messages
from nbdist.shared.errors import ClusterError
from nbdist.shared.packed import ANY_TAG

MAX_TAGS = 4096  # of a book; more are counted by peer alone
MAX_BOOKS = 1024  # beyond it, those of groups that are gone are dropped
ANY_SOURCE = "any"  # a peer in `received` when a message was taken from whoever sent one

AnyTable = SharedTable | StoreTable
AnyChannel = CheckChannel | StoreChannel


class GroupCounters:
    """The counts of one group."""

    __slots__ = (
        *("channel", "count", "group", "is_split", "messages", "name", "ranks", "received", "sent"),
        *("tagged", "title", "workers"),
    )

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        channel: AnyChannel | None,
        messages: Messages | None,
    ) -> None:
        self.name = name
        self.title = _title(group, name)  # for people
        self.group = ref(group)
        # Tensors on the GPU use another backend than others, and never match them.
        self.is_split = len(torch_backends.backends_of(group)) > 1
        # The threads that carry out asynchronous work in order; 0 where nothing queues.
        self.workers = torch_hooks.worker_count(group)
        self.ranks = ranks  # global, in the group's order; empty when torch does not know them
        self.channel = channel  # None: nothing is announced
        self.messages = messages  # None: none is announced
        self.count = 0  # collectives
        self.sent: dict[int, int] = {}  # messages, by the peer's global rank
        self.received: dict[int, int] = {}  # -1: from any source
        # By whether it is sent, the peer's global rank and the tag.
        self.tagged: dict[tuple[bool, int, int], int] = {}

    def next_in_tag(self, sends: bool, peer: int, tag: int, seq: int) -> tuple[int, int]:
        """Return the number of the next message with this tag, the peer's message number `seq`.

        Returns:
            The tag and the number: `ANY_TAG` and `seq` where too many tags are in use.
        """
        key = (sends, peer, tag)
        if key not in self.tagged and len(self.tagged) >= MAX_TAGS:
            return ANY_TAG, seq
        return tag, self.tagged.get(key, 0) + 1

    def count_in_tag(self, sends: bool, peer: int, tag: int, number: int) -> None:
        """Count a message, by what `next_in_tag` has returned for it."""
        if tag != ANY_TAG:
            self.tagged[sends, peer, tag] = number


class _Books:
    def __init__(self) -> None:
        self.by_name: dict[str, GroupCounters] = {}
        self.newest: GroupCounters | None = None  # the one among them that was asked for last
        # Equal on all ranks of a group, also on those that have not used it: how often counting
        # started over in this generation, and how many groups of its name were destroyed.
        self.period = 0
        self.destroyed: Counter[str] = Counter()
        self.table: AnyTable | None = None
        self.generation = 0
        self.closed: WeakSet[dist.ProcessGroup] = WeakSet()


_books = _Books()


def book_of(group: dist.ProcessGroup) -> GroupCounters:
    """Return the group's book; a new one when another group has taken its name.

    Raises:
        ClusterError: The group's ranks have left it.
    """
    book = _books.newest
    if book is not None and book.group() is group:
        return book
    book = _books.by_name.get(group.group_name)
    if book is None or book.group() is not group:
        book = _open(group)
    _books.newest = book
    return book


def _open(group: dist.ProcessGroup) -> GroupCounters:
    name = group.group_name
    if group in _books.closed:
        raise ClusterError(
            f"This process group ({_title(group, name)}) no longer exists.",
            why="the program destroyed the default group, or %dist scale changed the number of "
            "ranks, and its ranks have left it.",
            do="create it again, and what was created with it.",
        )
    ranks = torch_groups.ranks_of(group)
    incarnation = f"{_books.period}.{_books.destroyed[name]}"
    table, channel, announced = _books.table, None, None
    if table is not None:
        channel = table.channel(name, _title(group, name), ranks, incarnation)
        announced = messages(table, name, _title(group, name), ranks, incarnation)
    if len(_books.by_name) > MAX_BOOKS:
        _books.by_name = {n: b for n, b in _books.by_name.items() if b.group() is not None}
    book = _books.by_name[name] = GroupCounters(name, group, ranks, channel, announced)
    return book


def _title(group: dist.ProcessGroup, name: str) -> str:
    description = group.group_desc
    if description == "default_pg":
        return "the default group"
    if description.startswith("mesh_"):  # an axis of a DeviceMesh
        return f"group {description.removeprefix('mesh_')}"
    return f"group {name if description in ('', 'undefined') else description}"


def close(groups: Iterable[dist.ProcessGroup]) -> None:
    """Refuse all calls of these groups, which their ranks have left."""
    _books.closed.update(groups)


def end(group: dist.ProcessGroup) -> None:
    """Note that the program has destroyed a group: the next of its name is another."""
    _books.destroyed[group.group_name] += 1


def begin_generation(table: AnyTable | None, generation: int = 0) -> None:
    """Begin to count at zero, and announce in `table`: the groups are re-created."""
    for book in _books.by_name.values():
        # Releases the old memory, even if the book is still referenced.
        book.channel = book.messages = None
    _books.by_name, _books.newest, _books.table = {}, None, table
    _books.generation, _books.period = generation, 0
    _books.destroyed.clear()


def generation() -> int:
    """Return the number of this generation of the groups."""
    return _books.generation


def moment(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return a moment that all ranks of a group share: (generation, collectives made).

    All of them make the same collectives in one order: between two of these they are at the same
    place of their program. Messages are not counted, for only some ranks send them; with the tap
    off nothing is.
    """
    book = _books.by_name.get(group.group_name)
    is_its = book is not None and book.group() is group
    return _books.generation, book.count if book is not None and is_its else 0


def reset() -> None:
    """Begin to count at zero. On all ranks, between two of their collectives."""
    _books.by_name, _books.newest = {}, None
    _books.period += 1


def counts() -> dict[str, int]:
    """Return, by name, the collectives of each group since it was formed, zeros included."""
    found = {live.name: 0 for live in torch_groups.live_groups()}
    found.update({name: book.count for name, book in _books.by_name.copy().items()})
    return found


def sent() -> dict[str, int]:
    """Return the messages sent since the groups were formed, by "group/peer's global rank"."""
    return _messages([(book.name, book.sent) for book in _books.by_name.copy().values()])


def received() -> dict[str, int]:
    """Return the receives launched since the groups were formed, by "group/peer's global rank".

    Those from any source are under "group/any".
    """
    return _messages([(book.name, book.received) for book in _books.by_name.copy().values()])


def tagged() -> dict[str, int] | None:
    """Return the messages of each tag, by "group/send/peer/tag" and "group/recv/peer/tag".

    None where there are too many tags to know.
    """
    if any(len(book.tagged) >= MAX_TAGS for book in _books.by_name.copy().values()):
        return None
    return {
        f"{name}/{'send' if sends else 'recv'}/{peer if peer >= 0 else ANY_SOURCE}/{tag}": n
        for name, book in _books.by_name.copy().items()
        for (sends, peer, tag), n in book.tagged.copy().items()
    }


def _messages(found: list[tuple[str, dict[int, int]]]) -> dict[str, int]:
    return {
        f"{name}/{peer if peer >= 0 else ANY_SOURCE}": n
        for name, peers in found
        for peer, n in peers.copy().items()
    }


# A DataLoader's worker inherits the memory and must not write in it.
os.register_at_fork(after_in_child=lambda: begin_generation(None))
