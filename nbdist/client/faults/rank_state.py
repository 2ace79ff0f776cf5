"""What a rank says it is doing, as plain values: the answers of `control.state`.

What an engine does not say is unknown (None): nothing is ever concluded from it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nbdist.client.faults.advice import A_CELL, WhatRan
from nbdist.shared.text import name_bytes, name_ranks

WORLD = "0"  # how torch names the default group
STORE = "store"
MEETING = "init_process_group"  # `engine/group/meeting.KIND`
PAUSED = "paused"  # what a rank does that stands still as it was asked to
ANY = "any"  # the peer of a receive from any source, where messages are counted

# Bytes flow in lumps: what `emulate_link` slows down by two of loopback's packets of 64 KiB, every
# 0.13 s at 1 MB/s. A longer pause, as after a lost packet, is known as one only in a long wait.
_PAUSE_S, _LONG_PAUSE_S = 0.2, 2.0


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank's main thread waits in.

    `kind` is a collective's (`all_reduce`), `send`, `recv`, `store`, or that of a cell's
    `init_process_group`, which is its group, too. `seq` numbers the group's
    collectives from 1 since it was formed; for `send` and `recv` it numbers the messages with
    `peer`, which is None for a message from anyone. `ranks` are the group's members. `line` is the
    cell's, or that of another `cell` whose function waits. All ranks are global. `is_certain` is
    False inside backward, where the collective is under way and the main thread may also be
    computing. `title` is the group's, for people.
    `tag_number` numbers a message among those with its `tag`; 0 where that is unknown.
    """

    kind: str
    group: str = WORLD
    seq: int = 0
    bytes: int = 0
    seconds: float = 0.0
    line: int | None = None
    ranks: tuple[int, ...] | None = None
    peer: int | None = None
    is_certain: bool = True
    title: str = ""
    tag: int = 0
    tag_number: int = 0
    cell: int = 0

    def is_same(self, other: "Wait | None") -> bool:
        """Return whether this is the same wait, seen at another time."""
        return other is not None and self._identity == other._identity

    @property
    def _identity(self) -> tuple[object, ...]:
        return (self.kind, self.group, self.seq, self.peer, self.is_certain, self.line)

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks only."""
        return self.kind in ("send", "recv")

    @property
    def needs_one(self) -> bool:
        """Whether any of several ranks could end it."""
        return self.kind == STORE or (self.is_message and self.peer is None)

    def __str__(self) -> str:
        """Return e.g. `all_reduce #12 (8.4 MB, group dp), line 14`."""
        line = "" if self.line is None else f", {_name_line(self.cell, self.line)}"
        if self.kind == STORE:
            return f"the store, where groups are made{line}"
        if self.kind == MEETING:
            return f"{self.kind}{line}"
        facts = [name_bytes(self.bytes)] if self.bytes else []
        if self.tag:
            facts.append(f"tag {self.tag}")
        facts.append(self.title or f"group {self.group}")
        return f"{self.kind} #{self.seq} ({', '.join(facts)}){line}"


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank at one moment.

    `word` is `idle`, `computing`, `waiting`, `paused` or `loading data`. `function` and `line` (of
    the cell, or of another `cell`, by its prompt's number) tell where the main thread is. `counts`
    are the collectives launched by group, `sent` and `received` the messages by "group/peer",
    `tagged` those by "group/send/peer/tag" and "group/recv/peer/tag"; None where the rank does not
    say. A rank that `serves` answers messages on a thread, also when it has finished the cell. No
    byte has come from another rank, or gone to one, for `quiet_s`.
    """

    word: str
    wait: Wait | None = None
    counts: Mapping[str, int] | None = None
    sent: Mapping[str, int] | None = None
    received: Mapping[str, int] | None = None
    function: str | None = None
    line: int | None = None
    step: int = 0
    serves: bool = False
    tagged: Mapping[str, int] | None = None
    cell: int = 0
    quiet_s: float | None = None

    @classmethod
    def from_wire(cls, answer: Mapping[str, Any]) -> "RankState":
        """Return what an answer of `control.state` says."""
        where = answer.get("where") or {}
        wait = _wait_from(answer.get("waiting"), where)
        return cls(
            answer.get("doing") or ("waiting" if wait else "computing"),
            wait,
            answer.get("counts"),
            answer.get("sent"),
            answer.get("received"),
            where.get("function"),
            where.get("line"),
            answer.get("step", 0),
            answer.get("serves", False),
            answer.get("tagged"),
            where.get("cell", 0),
            answer.get("quiet_s"),
        )

    @property
    def stands(self) -> bool:
        """Whether it does nothing by itself: it waits for others, or is paused."""
        return self.wait is not None or self.word == PAUSED

    @property
    def progress(self) -> tuple[object, ...]:
        """What changes when this rank gets on."""
        wait = None if self.wait is None else self.wait._identity
        return (wait, self.step, self.counts, self.sent, self.received)

    @property
    def place(self) -> str:
        """Where it is, after `computing`: ` in load_batch (cell 2, line 3)`, or nothing."""
        function = f" in {self.function}" if self.function else ""
        return function + ("" if self.line is None else f" ({_name_line(self.cell, self.line)})")


@dataclass(frozen=True, slots=True)
class Inactive:
    """Why a rank launches nothing more in this cell; `detail` is said in brackets.

    `dead` are ranks that were so before the cell began, and are not in it. `freed` are ranks whose
    error only says that another is gone; `detail` is then what they waited in.
    """

    why: Literal["finished", "absent", "failed", "freed", "died", "dead"]
    detail: str = ""
    ran: WhatRan = A_CELL

    @property
    def is_fault(self) -> bool:
        """Whether something went wrong there in this cell."""
        return self.why in ("failed", "freed", "died")

    def predicate(self, count: int) -> str:
        """Return what is said of so many ranks: `has finished the cell`."""
        has, is_, was = ("has", "is", "was") if count == 1 else ("have", "are", "were")
        if self.why == "freed":
            return f"{was} released while waiting in {self.detail}"
        said = {
            "finished": f"{has} finished {self.ran.name}",
            "absent": f"{is_} not in {self.ran.this}",
            "failed": "failed",
            "died": "died",
            "dead": f"{is_} dead",
        }[self.why]
        return said + (f" ({self.detail})" if self.detail else "")


def awaits_bytes(doing: RankState, failed: Collection[int], world: frozenset[int]) -> bool:
    """Return whether bytes still flow of what a rank waits for.

    When links are cut, gloo forgets a message of which half has come or gone, and a wait for it has
    no end. Of ranks that go on among themselves, as under AsyncSGD, only long waits count: their
    bytes might flow until the cell ends.

    Args:
        doing: What the rank said.
        failed: The ranks with a fault. What they sent before may be on its way.
        world: All ranks.
    """
    wait = doing.wait
    if wait is None or doing.quiet_s is None or doing.serves:  # who serves has other bytes, too
        return False
    if doing.quiet_s >= max(_PAUSE_S, min(wait.seconds / 4, _LONG_PAUSE_S)):
        return False
    return wait.seconds > _PAUSE_S or not _partners(wait, world).isdisjoint(failed)


def members(wait: Wait, world: frozenset[int]) -> frozenset[int]:
    """Return the ranks that take part in what is waited for; none where that is unknown."""
    if wait.ranks is not None:
        return frozenset(wait.ranks)
    return world if wait.group == WORLD or wait.kind == STORE else frozenset()


def _partners(wait: Wait, world: frozenset[int]) -> frozenset[int]:
    """Return the ranks that the wait may be for, and for a collective the one that waits."""
    if wait.is_message and wait.peer is not None:
        return frozenset([wait.peer])
    return members(wait, world)


def missing_in(
    rank: int, doing: Mapping[int, RankState], gone: Mapping[int, Inactive], world: frozenset[int]
) -> frozenset[int]:
    """Return whom `rank` waits for: the ranks that are not where it waits.

    Args:
        rank: Whose `wait` it is.
        doing: The last answer of each rank; one that has not answered is not concluded about,
            unless it died.
        gone: The ranks that launch nothing more in this cell.
        world: All ranks.
    """
    wait = doing[rank].wait
    if wait is None:
        return frozenset()
    others = _partners(wait, world) - {rank}
    if wait.needs_one and not _is_known(rank, wait, doing, gone, others):
        return frozenset()
    return frozenset(
        peer for peer in others if _is_missing(peer, wait, rank, doing.get(peer), gone)
    )


def _is_known(
    rank: int,
    wait: Wait,
    doing: Mapping[int, RankState],
    gone: Mapping[int, Inactive],
    others: frozenset[int],
) -> bool:
    """Return whether none of `others` can have done already what one of them has to do."""
    if any(peer not in doing and not _is_dead(peer, gone) for peer in others):
        return False  # who has not answered may be the one
    here = doing[rank].tagged
    if wait.kind == STORE or here is None or not wait.tag_number:
        return True
    # Messages that no receive from their sender takes: as many may be on their way.
    left = 0
    for peer in others & doing.keys():
        there = doing[peer].tagged
        if there is None or doing[peer].serves:
            return False
        left += max(0, _sent(there, wait, rank) - here.get(_tag_key(wait, "recv", peer), 0))
    return left < wait.tag_number


def _is_dead(peer: int, gone: Mapping[int, Inactive]) -> bool:
    return peer in gone and gone[peer].why in ("died", "dead")


def _tag_key(wait: Wait, kind: str, peer: int | str) -> str:
    return f"{wait.group}/{kind}/{peer}/{wait.tag}"


def _sent(tagged: Mapping[str, int], wait: Wait, to: int) -> int:
    """Return how many messages with the wait's tag went `to` a rank, from the one that says so."""
    return tagged.get(_tag_key(wait, "send", to), 0)


def _is_missing(
    peer: int, wait: Wait, rank: int, there: RankState | None, gone: Mapping[int, Inactive]
) -> bool:
    if there is None:
        return _is_dead(peer, gone)
    if wait.needs_one:
        return True  # what it waits for may come from any of them
    if wait.is_message:
        return not there.serves and _has_no_end(wait, rank, there)
    beside = there.wait
    if beside is not None and beside.group == wait.group and not beside.is_message:
        if beside.kind != STORE and beside.seq == wait.seq:
            return beside.kind != wait.kind  # in the same place of the order, and another one
        if beside.kind != STORE and beside.seq > wait.seq:
            return False
    return there.counts is not None and there.counts.get(wait.group, 0) < wait.seq


def _has_no_end(wait: Wait, rank: int, there: RankState) -> bool:
    """Return whether a message's other end has not been launched there.

    Messages with a tag meet only those with the same, in the order of their calls. A receive from
    any source may have taken one that is sent.
    """
    beside = there.wait
    is_met = (
        beside is not None
        and beside.is_message
        and beside.peer == rank
        and beside.kind != wait.kind
        and (beside.group, beside.tag) == (wait.group, wait.tag)
    )
    if there.tagged is not None and wait.tag_number:
        if beside is not None and is_met and beside.tag_number >= wait.tag_number:
            return False
        if wait.kind == "recv":
            return _sent(there.tagged, wait, rank) < wait.tag_number
        taken = (there.tagged.get(_tag_key(wait, "recv", peer), 0) for peer in (rank, ANY))
        return sum(taken) < wait.tag_number
    if beside is not None and is_met and beside.seq >= wait.seq:
        return False
    done = there.sent if wait.kind == "recv" else there.received
    return done is not None and done.get(f"{wait.group}/{rank}", 0) < wait.seq


def waiters(ranks: frozenset[int]) -> str:
    """Return `rank 2 waits` or `ranks 0-1 wait`."""
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _name_line(cell: int, line: int) -> str:
    return f"cell {cell}, line {line}" if cell else f"line {line}"


def _wait_from(answer: Mapping[str, Any] | None, where: Mapping[str, Any]) -> Wait | None:
    if answer is None:
        return None
    _, _, line = (answer.get("line") or "").rpartition(":")
    return Wait(
        kind=answer["kind"],
        group=answer["group"],
        seq=answer.get("seq") or 0,
        bytes=answer.get("bytes") or 0,
        seconds=answer.get("seconds") or 0.0,
        line=int(line) if line.isdecimal() else None,
        ranks=tuple(answer.get("ranks") or ()) or None,
        peer=answer.get("peer"),
        is_certain=answer.get("is_certain", True),
        title=answer.get("title") or "",
        tag=answer.get("tag") or 0,
        tag_number=answer.get("tag_number") or 0,
        # The main thread may be elsewhere by now, as in a backward.
        cell=where.get("cell", 0) if answer.get("line") == where.get("file_line") else 0,
    )
