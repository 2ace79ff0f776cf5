"""Read the groups of a source ahead of a loop, and cut batches from them.

The buffer holds what is left of the groups that this rank's lanes are in, and `AHEAD` groups more:
a group is kept in chunks, and a chunk goes when its samples have been given. So lanes that come to
their ends together find their next groups read, and memory stays level.

Batches that are built the same way are mixed several at a time (`mixing`), ahead of the loop where
their groups are read by then.

Threads: `GroupFeed` is the loop's. Groups are read, and mixed ahead, on threads of the pass
(`reader_threads`).
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from nbdist.engine.compat.torch_loaders import SampleFault
from nbdist.engine.data import making
from nbdist.engine.data.batches import Seeds, Shard, part
from nbdist.engine.data.reading import columns, mixing, retry
from nbdist.engine.data.reading.interleave import Interleave, Ints, Piece
from nbdist.engine.data.reading.mixing import Stretch
from nbdist.engine.data.reading.reader_threads import ReaderThreads, own_cores, wanted
from nbdist.engine.data.sources.source import Columns, Source
from nbdist.shared.errors import DataError

AHEAD = 2  # groups that are read before a lane wants them
_CHUNKS = 8  # of a group
_UNSEEDED = Seeds(0, 0)
IDS = "\0id"  # the column of samples' numbers, which no file can have


@dataclass(frozen=True, slots=True)
class RowBlock:
    """A rank's samples of one batch.

    Attributes:
        columns: Of the source, by name.
        ids: The samples' numbers in the source, int64[samples].
        seed: What random numbers in the making of the batch follow from.
        skipped: Samples of this rank's that could not be read.
        repeated: Which samples of the whole batch stand in, where none of its own could be read.
    """

    columns: Columns
    ids: Ints
    seed: Seeds
    skipped: tuple[SampleFault, ...] = ()
    repeated: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def one(self, nth: int) -> "RowBlock":
        """Return a block of one of the samples."""
        return RowBlock(columns.cut(self.columns, nth, nth + 1), self.ids[nth : nth + 1], self.seed)

    def name(self, nth: int) -> int:
        """Return a sample's number in the source."""
        return int(self.ids[nth])

    def others(self) -> "Iterator[tuple[int, RowBlock]]":
        """Yield nothing: no other rank's samples are here."""
        return iter(())


@dataclass(slots=True)
class _Group:
    """A group in the buffer: its chunks, None where they are given."""

    read: "Future[list[Columns | None]]"
    size: int
    chunk: int  # samples of a chunk
    left: int  # samples that take memory

    @property
    def is_read(self) -> bool:
        return self.read.done() and self.read.exception() is None

    def cut(self, piece: Piece) -> Iterator[Columns]:
        chunks = self.read.result()
        for nth in range(piece.start // self.chunk, (piece.stop - 1) // self.chunk + 1):
            one, first = chunks[nth], nth * self.chunk
            assert one is not None, "samples are given once"
            yield columns.cut(one, max(piece.start - first, 0), piece.stop - first)

    def free(self, given: int) -> None:
        """Let go of the chunks whose samples were given."""
        whole = -(-given // self.chunk) if given == self.size else given // self.chunk
        left = self.size - min(whole * self.chunk, self.size)
        if left == self.left:
            return
        self.left = left
        if self.is_read:
            self.read.result()[:whole] = [None] * whole


class GroupFeed:
    """The samples of one pass over this rank's parts."""

    def __init__(
        self,
        source: Source,
        order: Interleave,
        start: int,
        ends: Sequence[int],
        shard: Shard,
        weights: tuple[float, ...] | None = None,
        seed: Seeds = _UNSEEDED,
        *,
        skips: bool = False,
        timeout_s: float = retry.READ_TIMEOUT_S,
    ) -> None:
        """Begin a pass; nothing is read before the first block is asked for.

        Args:
            source: Where groups are read.
            order: Of the epoch.
            start: The position at which the pass begins.
            ends: Where its batches end.
            shard: Which part of each batch is this rank's.
            weights: How large parts are.
            seed: Of the epoch, for the blocks.
            skips: Leave out what cannot be read.
            timeout_s: How long to wait for a group before it is read again.
        """
        self._skips, self._timeout_s = skips, timeout_s
        self._source, self._order, self._seed = source, order, seed
        self._start, self._ends, self._nth = start, ends, 0
        self._shard, self._weights = shard, weights
        self._groups: dict[int, _Group] = {}
        self._threads: ReaderThreads | None = None
        self._lanes: set[int] = set()  # this rank's
        self._live = -1  # for how many live lanes these are its lanes
        self._next = 0  # in the queue of the epoch
        self._budget = 0
        self._mixed: Iterator[Columns] = iter(())  # batches that are made already
        self._mixed_to = 0  # the batch after them
        self._plan: tuple[int, Stretch | None] = (-1, None)  # of the batches from that one on
        self._coming: Future[list[Columns]] | None = None  # what the plan makes, ahead

    def __iter__(self) -> Iterator[RowBlock]:
        return self

    def __next__(self) -> RowBlock:
        """Return the next batch's samples. An error or an interrupt leaves the feed as it was."""
        if self._nth == len(self._ends):
            self.close()
            raise StopIteration
        seed = self._seed._replace(start=self._begin_of(self._nth), shard=self._shard.index)
        if (found := next(self._mixed, None) or self._mix()) is not None:
            self._nth += 1
            self._mix_ahead()
            return RowBlock(found, found.pop(IDS), seed)
        pieces = self._pieces(self._nth)
        for piece in pieces:
            self._wanted(piece.group)
        self._read_ahead(self._nth)
        made = _Making()
        for piece in pieces:
            self._take(piece, made)
        if not made.parts:
            self._stand_in(made)
        self._nth += 1
        self._free(self._nth)
        self._read_ahead(self._nth)
        return made.block(seed)

    def _take(self, piece: Piece, made: "_Making") -> None:
        """Add the samples of a piece, or, where they are skipped, that they cannot be read."""
        try:
            made.add(self._read_whole(piece.group).cut(piece))
        except Exception as error:
            if not (self._skips and isinstance(error, DataError)):
                # It is read again, should the loop be asked again.
                self._groups.pop(piece.group, None)
                raise
            rows, ids = self._order.rows(piece.group), self._order.ids(piece.group)
            lost = (ids if rows is None else ids[rows])[piece.start : piece.stop]
            made.leave_out(lost, f"{error.what} {error.why}".strip())

    def _stand_in(self, made: "_Making") -> None:
        """Take one sample of another rank's part: a rank without any would make all wait.

        Raises:
            DataError: Nothing of the whole batch can be read.
        """
        start, end = self._begin_of(self._nth), self._ends[self._nth]
        offset = 0
        for piece in self._order.pieces(start, end, range(start, end)):
            try:
                group = self._read_whole(piece.group)
            except DataError:
                offset += piece.stop - piece.start
                continue
            made.add(group.cut(Piece(piece.lane, piece.group, piece.start, piece.start + 1)))
            made.repeated = [offset]
            return
        first = made.skipped[0]
        raise DataError(
            f"Nothing of a whole batch could be read, sample {first.sample} for one.",
            why=first.error,
            do="see to the files, then %dist retry",
        )

    def _read_whole(self, number: int) -> _Group:
        """Return a group that is read; begin its read again where it stalls.

        Raises:
            DataError: It cannot be read.
        """
        where = f"{self._source.name}: {self._source.where(number)}"
        for nth in range(1, retry.TRIES + 1):
            group = self._wanted(number)
            done, _ = wait([group.read], self._timeout_s or None)
            if done:
                group.read.result()
                return group
            if nth < retry.TRIES:
                retry.tell_stalled(where, self._timeout_s, nth)
            assert self._threads is not None  # it was to read this
            self._threads.start_thread()  # in place of the one that is kept waiting
            group.read = self._threads.submit(partial(self._read, number, group.chunk))
        group.read = Future()
        group.read.set_exception(retry.stalled(where, self._timeout_s))
        return self._read_whole(number)

    def _mix(self) -> Columns | None:
        """Return the first of several batches, made at once; None where `stretch` finds none.

        What cannot be read is left to `__next__`.
        """
        plan = self._planned(self._nth)
        if plan is None:
            return None
        groups = {number: self._wanted(number) for number in plan.groups}
        self._read_ahead(self._nth)
        try:
            for number in groups:
                self._read_whole(number)
        except Exception:
            return None
        coming, self._coming = self._coming, None
        is_here = coming is None or coming.cancel()  # no thread has come to it
        made = coming.result() if coming and not is_here else _mixed(plan, groups)
        self._mixed, self._mixed_to = iter(made), self._nth + plan.batches
        self._free(self._mixed_to)
        self._read_ahead(self._mixed_to)
        return next(self._mixed)

    def _mix_ahead(self) -> None:
        """Have the next stretch of batches mixed, if its groups are read and no thread does so."""
        if self._coming is not None or (plan := self._planned(self._mixed_to)) is None:
            return
        found = {number: self._groups.get(number) for number in plan.groups}
        groups = {number: group for number, group in found.items() if group and group.is_read}
        if len(groups) == len(found):
            assert self._threads is not None  # they have read the groups
            self._coming = self._threads.submit(partial(_mixed, plan, groups), is_urgent=True)

    def _planned(self, nth: int) -> Stretch | None:
        """Return the batches from `nth` on that are built the same way, if any."""
        if self._plan[0] != nth:
            begin, mine = self._begin_of(nth), range(0)
            most = int(self._order.sizes.mean() / 2)  # samples
            if nth < len(self._ends):
                mine = part(begin, self._ends[nth], self._shard, self._weights)
            ends = self._ends[nth : nth + most // max(1, len(mine))]
            self._plan = nth, mixing.stretch(self._order, begin, ends, mine)
        return self._plan[1]

    def close(self) -> None:
        """End the threads, and let go of all samples."""
        if self._threads is not None:
            self._threads.close()
        self._threads = None
        self._groups.clear()
        self._mixed, self._coming = iter(()), None

    def __del__(self) -> None:
        self.close()

    def _begin_of(self, nth: int) -> int:
        return self._ends[nth - 1] if nth else self._start

    def _pieces(self, nth: int) -> list[Piece]:
        start, end = self._begin_of(nth), self._ends[nth]
        return self._order.pieces(start, end, part(start, end, self._shard, self._weights))

    def _wanted(self, group: int) -> _Group:
        if group not in self._groups:
            if self._threads is None:
                self._threads = ReaderThreads(wanted(self._source.is_far, own_cores()))
            size = int(self._order.sizes[group])
            # As it lies a group is not copied, and all of it goes at once.
            chunk = -(-size // _CHUNKS) if self._order.is_shuffled else size
            read = self._threads.submit(lambda: self._read(group, chunk))
            self._groups[group] = _Group(read, size, chunk, size)
        return self._groups[group]

    def _free(self, nth: int) -> None:
        given = self._order.given(self._begin_of(nth))
        for number, group in list(self._groups.items()):
            group.free(self._order.given_of(number, given))
            if not group.left:
                del self._groups[number]

    def _read_ahead(self, nth: int) -> None:
        """Have the groups that batch `nth` and later ones want read, as far as there is room."""
        if nth == len(self._ends):
            return
        given = self._order.given(self._begin_of(nth))
        if (live := self._order.live(given)) != self._live:
            self._live, self._next = live, 0
            self._lanes = self._own_lanes(live, nth)
            lanes, mean = len(self._lanes), float(self._order.sizes.mean())
            ahead = AHEAD if self._order.is_shuffled else max(AHEAD, lanes)
            self._budget = math.ceil((lanes + ahead) * mean)
        held = sum(group.left for group in self._groups.values())
        while self._next < len(self._order.queue):
            group = int(self._order.queue[self._next])
            if self._is_wanted_later(group, given):
                size = int(self._order.sizes[group])
                if held + size > self._budget:
                    return
                self._wanted(group)
                held += size
            self._next += 1

    def _is_wanted_later(self, group: int, given: Ints) -> bool:
        return (
            int(self._order.lane_of[group]) in self._lanes
            and group not in self._groups
            and self._order.given_of(group, given) == 0
        )

    def _own_lanes(self, live: int, nth: int) -> set[int]:
        """Return the lanes that the next rounds' batches take this rank's samples from."""
        size = self._ends[nth] - self._begin_of(nth)
        # After so many batches the cut through the lanes lies as it lay.
        period = live // math.gcd(live, size) if live else 1
        last = min(nth + period, len(self._ends))
        return {piece.lane for later in range(nth, last) for piece in self._pieces(later)}

    def _read(self, group: int, chunk: int) -> list[Columns | None]:
        where = f"{self._source.name}: {self._source.where(group)}"
        with making.here.reading():
            found = retry.read(lambda: self._source.read(group), where)
            read = {**found, IDS: self._order.ids(group)}
            rows = self._order.rows(group)
            return [read] if rows is None else list(columns.chunks(read, rows, chunk))


def _mixed(plan: Stretch, groups: dict[int, _Group]) -> list[Columns]:
    return mixing.mixed(plan, lambda piece: list(groups[piece.group].cut(piece)))


class _Making:
    """A block in the making."""

    def __init__(self) -> None:
        self.parts: list[Columns] = []
        self.skipped: list[SampleFault] = []
        self.repeated: list[int] = []
        self._count = 0  # of the part's samples, those left out too

    def add(self, cuts: Iterator[Columns]) -> None:
        """Add samples."""
        for cut in cuts:
            self.parts.append(cut)
            self._count += columns.count(cut)

    def leave_out(self, samples: Ints, why: str) -> None:
        """Add samples that could not be read."""
        self.skipped += [
            SampleFault(int(sample), why, nth=nth)
            for nth, sample in enumerate(samples, self._count)
        ]
        self._count += len(samples)

    def block(self, seed: Seeds) -> RowBlock:
        """Return what was added."""
        found = columns.joined(self.parts)
        ids = found.pop(IDS)
        return RowBlock(found, ids, seed, tuple(self.skipped), tuple(self.repeated))
