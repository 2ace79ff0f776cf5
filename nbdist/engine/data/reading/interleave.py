"""The order of an epoch over groups of samples that are read whole. Pure: no torch, no files.

A *group* is what is read at once: a Parquet row group, say. The groups of an epoch wait in one
queue. *Lanes* take from it: a lane gives the samples of its group one by one, and takes the next
group of the queue when its own is used up. In a *round* each lane gives one sample, and the rounds,
one after the other, are the epoch's positions. So a batch mixes samples of as many groups as there
are lanes, and few groups are open at a time. Towards the end lanes find the queue empty, and fewer
are left.

Groups, and with them all that is kept here, are few: a billion samples are some thousand groups.
Nothing depends on the number of ranks. A rank's part of a batch is cut from its samples in the
order of lanes: where the number of ranks divides that of lanes, each lane belongs to one rank.

Source: tf.data's `interleave` with a fixed cycle, made random access by its arithmetic.
"""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbdist.engine.data.batches import mix

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples `start` to `stop` of a group, counted in the order in which the epoch gives them."""

    lane: int
    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Lane:
    """The groups that one lane takes, and how many samples it has given before each of them."""

    groups: list[int]
    starts: list[int]  # [groups + 1]; the last one is all that the lane gives


def lanes_of(interleave: int, groups: int, global_batch: int) -> int:
    """Return how many lanes an epoch has, `interleave` at most.

    Best is a number that divides the batch: all batches then take equally many of all lanes, and a
    rank keeps its lanes. Where that would be less than half of what was asked for, the mix counts
    more.
    """
    most = min(interleave, groups)
    dividing = (lanes for lanes in range(most, most // 2, -1) if global_batch % lanes == 0)
    return next(dividing, most)


class Interleave:
    """The order of one epoch."""

    def __init__(
        self, sizes: Sequence[int] | Ints, lanes: int, shuffle: bool, seed: int, epoch: int
    ) -> None:
        """Share the groups out to the lanes.

        Args:
            sizes: Samples of each group, one at least.
            lanes: How many groups are open at a time; at most as many as there are groups.
            shuffle: Permute the groups, and the samples of each; else both keep their order.
            seed: With `epoch` it decides the order.
            epoch: From 0.
        """
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self._seed = mix(seed, epoch) if shuffle else None
        self.is_shuffled = shuffle
        self._first_ids = np.cumsum(self.sizes) - self.sizes
        count = len(self.sizes)
        in_order = np.arange(count, dtype=np.int64)
        self.queue: Ints = (
            in_order if self._seed is None else _random(self._seed).permutation(count)
        )
        self._lanes = _shared_out(self.queue, self.sizes, min(lanes, count))
        self.lane_of = np.empty(count, dtype=np.int64)  # by group
        self._before_group = np.empty(count, dtype=np.int64)  # given by its lane before it
        for nth, lane in enumerate(self._lanes):
            self.lane_of[lane.groups] = nth
            self._before_group[lane.groups] = lane.starts[:-1]
        self._ends = np.array([lane.starts[-1] for lane in self._lanes], dtype=np.int64)
        self._sorted_ends = np.sort(self._ends)
        self._given = (-1, self._ends)  # the newest answer: a batch begins where the last one ended
        self._before_end = np.array([self._before(r) for r in self._sorted_ends], dtype=np.int64)

    def given(self, position: int) -> Ints:
        """Return how many samples each lane has given before a position: int64[lanes]."""
        if self._given[0] != position:
            self._given = position, self._find_given(position)
        return self._given[1]

    def _find_given(self, position: int) -> Ints:
        # Between two lanes' ends every round has the same number of samples.
        nth = int(np.searchsorted(self._before_end, position, side="right"))
        if nth == len(self._ends):
            return self._ends
        first, before = (
            (int(self._sorted_ends[nth - 1]), int(self._before_end[nth - 1])) if nth else (0, 0)
        )
        rounds, rest = divmod(position - before, len(self._ends) - nth)
        given = np.minimum(self._ends, first + rounds)
        given[np.flatnonzero(self._ends > first + rounds)[:rest]] += 1
        return given

    def pieces(self, start: int, end: int, part: range) -> list[Piece]:
        """Return the samples of one part of the batch `range(start, end)`, lane after lane.

        Args:
            start: Where the batch begins.
            end: Where it ends.
            part: Positions of the part, in the range of the batch.
        """
        lows, highs = self.given(start), self.given(end)
        found: list[Piece] = []
        offset = start  # of the lane's samples in the batch
        for lane, (low, high) in enumerate(zip(lows.tolist(), highs.tolist(), strict=True)):
            if offset >= part.stop:
                break
            first, last = max(low, low + part.start - offset), min(high, low + part.stop - offset)
            if first < last:
                found += self.of_lane(lane, first, last)
            offset += high - low
        return found

    def rounds_at(self, position: int) -> tuple[list[int], int | None]:
        """Return the lanes that live at a position, and the round that begins there, if any."""
        given = self.given(position)
        lives = np.flatnonzero(given < self._ends)
        rounds = given[lives]
        begins = len(lives) > 0 and bool((rounds == rounds[0]).all())
        return lives.tolist(), int(rounds[0]) if begins else None

    def rounds_left(self, lanes: list[int]) -> int:
        """Return in which round the first of some lanes ends."""
        return int(self._ends[lanes].min())

    def of_lane(self, lane: int, low: int, high: int) -> list[Piece]:
        """Return the samples `low` to `high` that a lane gives."""
        groups, starts = self._lanes[lane].groups, self._lanes[lane].starts
        found = []
        nth = bisect.bisect_right(starts, low) - 1
        while low < high:
            begin, stop = starts[nth], min(high, starts[nth + 1])
            found.append(Piece(lane, groups[nth], low - begin, stop - begin))
            low, nth = stop, nth + 1
        return found

    def given_of(self, group: int, given: Ints) -> int:
        """Return how many samples of a group were given; `given` is what each lane has."""
        before = int(self._before_group[group])
        return min(max(int(given[self.lane_of[group]]) - before, 0), int(self.sizes[group]))

    def live(self, given: Ints) -> int:
        """Return how many lanes still have samples."""
        return int(np.count_nonzero(given < self._ends))

    def ids(self, group: int) -> Ints:
        """Return the numbers of a group's samples, as they lie: int64[size]."""
        first = int(self._first_ids[group])
        return np.arange(first, first + self.sizes[group])

    def rows(self, group: int) -> Ints | None:
        """Return the order of a group's samples, int64[size]; None: as they lie.

        The generator is numpy's old one, whose numbers no release may change (NEP 19): a state
        is good for years.
        """
        if self._seed is None:
            return None
        order: Ints = _random(mix(self._seed, group)).permutation(int(self.sizes[group]))
        return order

    def _before(self, round_: int) -> int:
        """Return how many positions lie before a round."""
        return int(np.minimum(self._ends, round_).sum())


def _shared_out(order: Ints, sizes: Ints, lanes: int) -> list[_Lane]:
    """Let each group of the queue be taken by the lane that is free first."""
    taken: list[list[int]] = [[] for _ in range(lanes)]
    free = [(0, lane) for lane in range(lanes)]  # a heap: in which round, and which lane
    for group in order.tolist():
        round_, lane = free[0]
        taken[lane].append(group)
        heapq.heapreplace(free, (round_ + int(sizes[group]), lane))
    return [
        _Lane(groups, [0, *np.cumsum(sizes[groups], dtype=np.int64).tolist()]) for groups in taken
    ]


def _random(seed: int) -> np.random.RandomState:
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32])
