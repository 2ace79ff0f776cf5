"""The order of an epoch over groups: every sample once, whatever the ranks, from any position."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.engine.data.batches import Shard, cut, part
from nbdist.engine.data.reading.interleave import Interleave, lanes_of

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=30)
LANES = st.integers(1, 20)
RANKS = st.integers(1, 7)


def ids(order: Interleave, start: int, end: int, positions: range) -> list[int]:
    """Return the numbers of the samples of one part of a batch."""
    found: list[int] = []
    for piece in order.pieces(start, end, positions):
        rows = order.rows(piece.group)
        numbers = order.ids(piece.group)
        numbers = numbers if rows is None else numbers[rows]
        found += numbers[piece.start : piece.stop].tolist()
    return found


def batches(
    order: Interleave,
    batch: int,
    ranks: int,
    start: int = 0,
    weights: tuple[float, ...] | None = None,
) -> list[list[list[int]]]:
    """Return the samples of each rank's part of each batch."""
    found = []
    for end in cut(int(order.sizes.sum()), start, batch, ranks, drop_last=False):
        shards = [Shard(rank, ranks) for rank in range(ranks)]
        found.append([ids(order, start, end, part(start, end, s, weights)) for s in shards])
        start = end
    return found


@settings(deadline=None)
@given(sizes=SIZES, lanes=LANES, extra=st.integers(0, 50), ranks=RANKS, data=st.data())
def test_every_sample_comes_once_in_parts_of_the_sizes_that_are_asked_for(
    sizes: list[int], lanes: int, extra: int, ranks: int, data: st.DataObject
) -> None:
    shuffle = data.draw(st.booleans())
    numbers = st.lists(st.floats(0.1, 10), min_size=ranks, max_size=ranks)
    weights = data.draw(st.none() | numbers.map(tuple))
    samples = sum(sizes)
    ranks = min(ranks, samples)
    weights = None if weights is None else weights[:ranks]
    order = Interleave(sizes, lanes, shuffle, seed=3, epoch=1)
    seen, start = [], 0
    for parts in batches(order, ranks + extra, ranks, weights=weights):
        end = start + sum(map(len, parts))
        for rank, one in enumerate(parts):
            assert len(one) == len(part(start, end, Shard(rank, ranks), weights))
            seen += one
        start = end
    assert sorted(seen) == list(range(samples))


@settings(deadline=None)
@given(sizes=SIZES, lanes=LANES, batch=st.integers(7, 60), ranks=RANKS)
def test_global_batches_are_the_same_on_any_number_of_ranks(
    sizes: list[int], lanes: int, batch: int, ranks: int
) -> None:
    order = Interleave(sizes, lanes, True, seed=0, epoch=0)
    end = min(batch, sum(sizes))
    ranks = min(ranks, end)
    together = [i for s in range(ranks) for i in ids(order, 0, end, part(0, end, Shard(s, ranks)))]
    assert together == ids(order, 0, end, range(end))


@settings(deadline=None)
@given(
    sizes=SIZES,
    lanes=LANES,
    at=st.floats(0, 1),
    before=st.tuples(st.integers(7, 50), RANKS),
    after=st.tuples(st.integers(7, 50), RANKS),
)
def test_an_epoch_resumes_at_any_position_with_other_ranks_and_batches(
    sizes: list[int], lanes: int, at: float, before: tuple[int, int], after: tuple[int, int]
) -> None:
    samples = sum(sizes)
    order = Interleave(sizes, lanes, True, seed=5, epoch=2)
    stop = min(round(at * samples), samples)
    first: list[int] = []
    start = 0
    for end in cut(samples, 0, *before, drop_last=False):
        if end > stop:
            break
        first += ids(order, start, end, range(start, end))
        start = end
    rest = [i for parts in batches(order, *after, start=start) for p in parts for i in p]
    left = samples - start - len(rest)  # too few for the ranks, and no batch before to join
    assert len(set(first + rest)) == len(first) + len(rest) == samples - left
    assert left < after[1]


@settings(deadline=None)
@given(sizes=SIZES)
def test_without_shuffle_one_lane_keeps_the_order_of_the_files(sizes: list[int]) -> None:
    samples = sum(sizes)
    order = Interleave(sizes, 1, False, 0, 0)
    assert ids(order, 0, samples, range(samples)) == list(range(samples))


def test_another_epoch_or_seed_is_another_order() -> None:
    def whole(seed: int, epoch: int) -> list[int]:
        return ids(Interleave([9] * 9, 4, True, seed, epoch), 0, 81, range(81))

    assert whole(0, 0) == whole(0, 0)
    assert len({tuple(whole(*which)) for which in [(0, 0), (0, 1), (1, 0)]}) == 3


def test_the_order_of_an_epoch_is_what_it_was_in_earlier_releases() -> None:
    order = Interleave([4, 3, 5], 2, True, seed=1, epoch=2)
    assert ids(order, 0, 12, range(12)) == [3, 1, 0, 2, 5, 6, 4, 11, 10, 7, 9, 8]


@settings(deadline=None)
@given(groups=st.integers(1, 6), lanes=st.sampled_from([4, 8, 16]), rounds=st.integers(1, 9))
def test_each_group_is_read_by_one_rank_where_ranks_divide_lanes(
    groups: int, lanes: int, rounds: int
) -> None:
    order = Interleave([12] * (groups * lanes), lanes, True, 0, 0)
    read: dict[int, set[int]] = {}
    start = 0
    for end in cut(int(order.sizes.sum()), 0, lanes * rounds, 4, drop_last=False):
        for rank in range(4):
            for piece in order.pieces(start, end, part(start, end, Shard(rank, 4))):
                read.setdefault(piece.group, set()).add(rank)
        start = end
    assert all(len(ranks) == 1 for ranks in read.values())


def test_the_number_of_lanes_divides_the_batch_where_that_leaves_enough() -> None:
    assert lanes_of(16, groups=1000, global_batch=4096) == 16
    assert lanes_of(16, groups=1000, global_batch=100) == 10
    assert lanes_of(16, groups=10, global_batch=64) == 8
    assert lanes_of(16, groups=1000, global_batch=127) == 16
    assert lanes_of(16, groups=1, global_batch=127) == lanes_of(1, 9, 64) == 1


def test_a_billion_samples_take_memory_and_time_by_groups_alone() -> None:
    sizes = np.full(8_000, 131_072)
    order = Interleave(sizes, 16, True, 0, 0)
    samples = int(sizes.sum())
    assert samples > 1_000_000_000
    kept = sum(v.nbytes for v in vars(order).values() if isinstance(v, np.ndarray))
    assert kept < 1_000_000
    pieces = order.pieces(
        samples // 2, samples // 2 + 4096, range(samples // 2, samples // 2 + 512)
    )
    assert sum(piece.stop - piece.start for piece in pieces) == 512
