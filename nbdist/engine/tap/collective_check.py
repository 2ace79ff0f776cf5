"""Compare each collective with those of the peers before anything is sent.

gloo ends a process that receives another size than it expects (`std::terminate`), and ranks that
call different collectives wait for each other for ever. So each rank first writes what it is about
to do into memory that the ranks of one host share, then reads what its peers in the group have
written of the collective with the same number. A rank that finds a difference raises
`MismatchError` and sends nothing; one that came first and waits is freed by the rescue. Whatever
order the ranks come in, the last of two has seen the other.

Compared are kind, type, size, root and reduction, as far as ranks must agree on them (`ops.py`),
for which parameters it is where that is known (`purpose.py`), and of an `all_to_all` with splits
what each rank sends to each with what that one expects. Not seen: a peer that is over a thousand
collectives (with splits, a hundred) ahead, and operators the tap does not see. Ranks on another
host than rank 0 are not compared here; `collective_check_store` does that, slowly, where it is
asked for. Messages have entries of their own, behind these (`message_check`).

Each generation of the groups has memory of its own (`shared_memory.py`), so that nothing of an
older one is left. Layout: for each rank ENTRIES entries of WORDS 64-bit words: id, call, compared
size, bytes, place, purpose. The id is the group's key plus the collective's number, which also
gives the entry's place; it is written last, and 0 while the entry is being written. Behind the
messages are the splits: for each rank ROWS rows of an id, the bytes to each rank and the bytes
from each.

Threads: a collective is announced by the thread that launches it.
"""

import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import permutations

from nbdist.engine.kernel import location
from nbdist.engine.tap.purpose import BUFFERS, UNKNOWN, Purpose
from nbdist.shared.collectives import COLLECTIVES
from nbdist.shared.errors import MismatchError
from nbdist.shared.text import name_bytes, name_ranks

ENTRIES = 2048  # a rank
MESSAGES = 1024  # a rank
ROWS = 128  # of splits, a rank
WORDS = 8  # an entry; one cache line
# An id is key + number, with a count of tries and a mark above.
_KEY_BITS = 54
_TRY = 1 << 56
REFUSED = 1 << 63  # its writer has raised, and sent nothing
# A compared size from here on says that the splits decide. No two ranks write the same: so a rank
# with splits, or one that meets it, finds a difference and looks closer; others pay nothing.
SPLIT = 1 << 62
# A difference is read twice. A rank whose backend refuses the arguments has announced what it never
# sends, and takes it back within microseconds of its own.
CONFIRM_S = 0.02

KINDS = tuple(COLLECTIVES)
DTYPES = (
    *("", "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8"),
    *("uint8", "uint16", "uint32", "uint64", "bool", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_ITEM_BYTES = (0, 4, 8, 2, 2, 8, 4, 2, 1, 1, 2, 4, 8, 1, 4, 8, 16, 1, 1, 1, 1, 1)
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


# A call is one number: kind + DTYPE * type + REDUCTION * reduction + ROOT * (root + 1), and CUDA
# for tensors on a GPU in a group that has a backend of its own for those.
DTYPE, REDUCTION, ROOT, CUDA = 1 << 8, 1 << 16, 1 << 24, 1 << 48


def pack(kind: str, dtype: int = 0, reduction: int = 0, root: int = -1) -> int:
    """Return a call as a number.

    Args:
        kind: One of KINDS.
        dtype: Position in DTYPES.
        reduction: Position in REDUCTIONS.
        root: Rank within the group, -1 where there is none.
    """
    return KINDS.index(kind) + DTYPE * dtype + REDUCTION * reduction + ROOT * (root + 1)


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One rank's announcement of a collective."""

    call: int  # see `pack`
    size: int  # compared; 0 where sizes may differ
    bytes: int
    place: int  # prompt's number << 32 | line; 0 when not known
    purpose: int = 0  # the key of a `Purpose`
    splits: tuple[int, ...] = ()  # bytes to each of the group, then from each

    def parts(self, ranks: int) -> tuple[int, ...]:
        """Return the bytes to each of so many ranks, then from each; nothing where not known."""
        if self.splits or self.size >= SPLIT:
            return self.splits
        return (self.size // ranks,) * (2 * ranks)

    @property
    def reduction(self) -> int:
        """Return the position in REDUCTIONS."""
        return self.call // REDUCTION & 0xFF

    def is_like(self, other: "CollectiveCall") -> bool:
        """Return whether the two can be one collective."""
        return (self.call, self.size) == (other.call, other.size) and self.is_for_what(other)

    def is_for_what(self, other: "CollectiveCall") -> bool:
        """Return whether both are for the same parameters, as far as is known."""
        return self.purpose == other.purpose or not (self.purpose and other.purpose)

    def describe(
        self, members: Sequence[int], *, with_reduction: bool, own: Purpose = UNKNOWN
    ) -> str:
        """Return e.g. "all_reduce of 1,000 float32 (4.0 kB), cell 7, line 5"."""
        known, dtype = COLLECTIVES[KINDS[self.call & 0xFF]], self.call // DTYPE & 0xFF
        text = known.kind
        if with_reduction and known.reduces:
            text += f" ({REDUCTIONS[self.reduction]})"
        root = (self.call // ROOT & 0xFFFF) - 1
        if root >= 0:
            rank = members[root] if root < len(members) else root
            text += f" {known.root or 'at'} rank {rank}"
        if dtype or self.bytes:
            text += f" of {describe_payload(dtype, self.bytes)}"
        if self.call & CUDA:
            text += " on cuda"
        return text + own.describe(self.purpose) + describe_place(self.place)


def describe_payload(dtype: int, size_bytes: int) -> str:
    """Return e.g. "1,000 float32 (4.0 kB)"; bytes alone of a type that is not known, 0."""
    if not dtype:
        return name_bytes(size_bytes)
    return f"{size_bytes // _ITEM_BYTES[dtype]:,} {DTYPES[dtype]} ({name_bytes(size_bytes)})"


def describe_place(place: int) -> str:
    """Return e.g. ", cell 7, line 5"; nothing where it is not known."""
    line = location.here.describe_line(place >> 32, place & 0xFFFFFFFF)
    return f", {line}" if line else ""


def mismatch(
    title: str,
    number: int,
    members: Sequence[int],
    calls: Mapping[int, CollectiveCall],
    own: Purpose = UNKNOWN,
) -> MismatchError | None:
    """Return the error when announced calls differ, None when they match.

    Args:
        title: The group in words, such as "group dp".
        number: The collective's, in the group.
        members: The group's global ranks, in its order.
        calls: By global rank; ranks that have announced nothing are left out.
        own: What this rank's call is for.
    """
    first = next(iter(calls.values()))
    is_same = all(call.call == first.call for call in calls.values())
    if is_same and any(call.size >= SPLIT for call in calls.values()):
        return _split_mismatch(title, number, members, calls)
    if all(call.is_like(first) for call in calls.values()):
        return None
    is_for_one = all(call.is_for_what(first) for call in calls.values())
    reductions = {call.reduction for call in calls.values()}
    by_text: dict[str, list[int]] = {}
    for rank in sorted(calls):
        text = calls[rank].describe(members, with_reduction=len(reductions) > 1, own=own)
        by_text.setdefault(text, []).append(rank)
    sides = [
        f"{name_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {text}"
        for text, ranks in by_text.items()
    ]
    do = "let all ranks of the group make the same calls, in one order and of equal sizes."
    if len({call.purpose == BUFFERS.key for call in calls.values()}) > 1:
        do = (
            "let all ranks run the model as often and in one mode, model.train() or model.eval(): "
            "after a forward in evaluation, or under no_grad, no buffers are sent."
        )
    elif not is_for_one:
        do = (
            "let all ranks run the same parts of the model, and multiply by 0 what a rank's loss "
            "does not need."
        )
    return MismatchError(
        f"Collective #{number} of {title} ({name_ranks(members)}) differs between ranks.",
        why="; ".join(sides) + ".",
        do=do,
    )


def _split_mismatch(
    title: str, number: int, members: Sequence[int], calls: Mapping[int, CollectiveCall]
) -> MismatchError | None:
    """Return the error of the first rank that sends another what that one does not expect."""
    n = len(members)
    parts = {at: calls[rank].parts(n) for at, rank in enumerate(members) if rank in calls}
    for source, to in permutations([at for at in parts if parts[at]], 2):
        sent, received = parts[source][to], parts[to][n + source]
        if sent != received:
            break
    else:
        return None
    sender, receiver = calls[members[source]], calls[members[to]]
    dtype = sender.call // DTYPE & 0xFF
    return MismatchError(
        f"Collective #{number} of {title} ({name_ranks(members)}) differs between ranks.",
        why=f"rank {members[source]} calls all_to_all and sends rank {members[to]} "
        f"{describe_payload(dtype, sent)}{describe_place(sender.place)}; "
        f"rank {members[to]} calls all_to_all and receives {describe_payload(dtype, received)} "
        f"from rank {members[source]}{describe_place(receiver.place)}.",
        do="let the output splits be what the peers send: "
        "dist.all_to_all_single(output_splits, input_splits) tells each rank.",
    )


def size_bytes(world_size: int) -> int:
    """Return the bytes that the announcements of so many ranks take."""
    row = 1 + 2 * world_size
    return world_size * ((ENTRIES + MESSAGES) * WORDS + ROWS * row) * 8


def key_of(text: str) -> int:
    """Return a key of 54 bits, never 0: unique in this generation, and equal on all ranks."""
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _KEY_BITS) | 1


class SharedTable:
    """The announcements of all ranks in one generation."""

    def __init__(self, memory: memoryview, rank: int, world_size: int) -> None:
        """Use memory of `size_bytes`, all zeros at the beginning, as `rank`."""
        self.rank = rank
        self.words = memory.cast("Q")
        self.messages_at = world_size * ENTRIES * WORDS  # where those of rank 0 begin
        self.splits_at = world_size * (ENTRIES + MESSAGES) * WORDS
        self.row = 1 + 2 * world_size

    def channel(
        self, name: str, title: str, members: Sequence[int], incarnation: str
    ) -> "CheckChannel | None":
        """Return this rank's way to announce collectives of a group, None where it is alone.

        Args:
            name: The group's, as torch names it.
            title: The group's, for people.
            members: Its global ranks, in its order.
            incarnation: Distinguishes groups of this name and these members; equal on all ranks.
        """
        if len(members) < 2 or self.rank not in members:
            return None
        key = key_of(f"{name}|{tuple(members)}|{incarnation}")
        return CheckChannel(self, key, title, tuple(members))


class CheckChannel:
    """One group's entries in the table."""

    __slots__ = (
        *("_areas", "_key", "_members", "_own", "_peers", "_rank", "_table", "_title", "_words"),
        *("_tried", "_tries"),
    )

    def __init__(self, table: SharedTable, key: int, title: str, members: tuple[int, ...]) -> None:
        self._table = table
        self._words = table.words
        self._rank = table.rank
        self._key = key
        self._title = title
        self._members = members
        self._tried = self._tries = 0
        self._areas = {rank: rank * ENTRIES * WORDS for rank in members}
        self._own = self._areas[table.rank]
        self._peers = tuple(area for rank, area in self._areas.items() if rank != table.rank)

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
        """Write what this rank is about to launch, and compare it with its peers.

        Args:
            number: The collective's, in the group, from 1.
            call: See `pack`.
            size: To be the same on all ranks; 0 where it need not.
            size_bytes: To be shown.
            place: See `CollectiveCall`.
            purpose: What it is for.
            splits: Likewise; `size` is not compared then.

        Raises:
            MismatchError: A peer has announced something else; nothing may be sent.
        """
        words = self._words
        entry_id = self._key + number
        at = entry_id % ENTRIES * WORDS
        if number == self._tried:
            entry_id += _TRY * (self._tries % 64)
        own = self._own + at
        if splits:
            self._write_splits(entry_id, splits)
            size = SPLIT + self._rank
        words[own] = 0
        words[own + 1] = call
        words[own + 2] = size
        words[own + 3] = size_bytes
        words[own + 4] = place
        words[own + 5] = key = purpose.key
        words[own] = entry_id
        # Two ranks may come at the same moment: neither may read before it has been written.
        with fence:
            pass
        for area in self._peers:
            peer = area + at
            if words[peer] == entry_id and (
                words[peer + 1] != call
                or words[peer + 2] != size
                or (key and words[peer + 5] not in (key, 0))
            ):
                self._refuse(number, entry_id, at, purpose)
                break  # it has looked at all of them

    def withdraw(self, number: int) -> None:
        """Withdraw an announcement that was never sent: the backend refused it.

        The next try has the same number, and is compared only with peers that have made as many
        tries: those whose backend has refused the same.
        """
        self._words[self._own + (self._key + number) % ENTRIES * WORDS] = 0
        self._tries = self._tries + 1 if number == self._tried else 1
        self._tried = number

    def _write_splits(self, entry_id: int, splits: Sequence[int]) -> None:
        words, row = self._words, self._row_of(self._rank, entry_id)
        words[row] = 0
        words[row + 1 : row + 1 + len(splits)] = array("Q", splits)
        words[row] = entry_id

    def _row_of(self, rank: int, entry_id: int) -> int:
        table = self._table
        return table.splits_at + (rank * ROWS + entry_id % ROWS) * table.row

    def _splits_of(self, rank: int, entry_id: int) -> tuple[int, ...]:
        """Return the splits a rank has written; nothing when newer ones took their place."""
        row = self._row_of(rank, entry_id)
        found = tuple(self._words[row + 1 : row + 1 + 2 * len(self._members)].tolist())
        return found if self._words[row] == entry_id else ()

    def _difference(
        self, number: int, entry_id: int, at: int, own: Purpose
    ) -> MismatchError | None:
        calls = {}
        for rank, area in self._areas.items():
            found, call, size, total, place, key = self._words[area + at : area + at + 6].tolist()
            # A peer that raises at this moment has marked its entry, and is still the other side.
            if found in (entry_id, entry_id | REFUSED):
                splits = self._splits_of(rank, entry_id) if size >= SPLIT else ()
                calls[rank] = CollectiveCall(call, size, total, place, key, splits)
        return mismatch(self._title, number, self._members, calls, own)

    def _refuse(self, number: int, entry_id: int, at: int, own: Purpose) -> None:
        if self._difference(number, entry_id, at, own) is None:  # splits that meet
            return
        time.sleep(CONFIRM_S)
        error = self._difference(number, entry_id, at, own)
        if error is not None:
            self._words[self._own + at] = entry_id | REFUSED
            raise error


fence = threading.Lock()
