"""Counting positions from journals, against counting them one by one."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.engine.data.batches import Shard, part
from nbdist.engine.data.counts import Kind, by_epoch, count
from nbdist.engine.data.position.journal import (
    BEFORE,
    FORGOTTEN,
    GIVEN,
    LEFT_OUT,
    OVER,
    SKIPPED,
    JournalEntry,
)

ALL = Shard(0, 1)


def entry(start: int, stop: int, serial: int = 0, shard: Shard = ALL) -> JournalEntry:
    """Return one batch of one shard, of which that shard's part is all."""
    size = stop - start
    return JournalEntry(1, GIVEN, serial, 0, start, size, 1, 0, size, shard.index, shard.count)


def test_parts_of_all_ranks_are_each_sample_once() -> None:
    ranks = [
        JournalEntry(1, GIVEN, 0, 0, 0, 10, 10, mine.start, len(mine), shard, 3)
        for shard in range(3)
        for mine in [part(0, 10, Shard(shard, 3))]
    ]
    found = count([*ranks, JournalEntry(1, OVER, 10, 0, 100, 0)], 100, is_followed=False)
    assert (found.once, found.missing.count, found.repeated.count) == (100, 0, 0)
    without_one = count([*ranks[:2], JournalEntry(1, OVER, 10, 0, 100, 0)], 100, is_followed=False)
    assert without_one.missing == Kind(30, (7, 8, 9, 17, 18))


def test_ranks_of_one_shard_get_the_same_by_design_and_two_batches_do_not() -> None:
    shard = Shard(0, 2)
    alike = [entry(0, 8, 0, shard), entry(0, 8, 0, shard)]
    assert count(alike, 8, is_followed=True).repeated.count == 0
    again = [entry(0, 8, 0, shard), entry(0, 8, 1, shard)]
    assert count(again, 8, is_followed=True).repeated == Kind(8, (0, 1, 2, 3, 4))


def test_a_run_that_ranks_cut_differently_counts_once() -> None:
    whole = JournalEntry(1, GIVEN, 0, 0, 0, 4, 5, 0, 2, 0, 2)
    halves = [whole._replace(batches=2), JournalEntry(1, GIVEN, 2, 0, 8, 4, 3, 0, 2, 0, 2)]
    assert count([whole, *halves], 20, is_followed=False).repeated.count == 0


def test_what_is_to_come_is_not_missing_until_a_later_epoch_has_begun() -> None:
    assert count([entry(0, 8)], 20, is_followed=False).to_come == 12
    found = count([entry(0, 8)], 20, is_followed=True)
    assert (found.to_come, found.missing) == (0, Kind(12, (8, 9, 10, 11, 12)))


def test_what_was_left_out_skipped_or_given_before_is_not_missing() -> None:
    entries = [
        JournalEntry(1, BEFORE, 0, 0, 0, 4),
        entry(4, 16),
        JournalEntry(1, SKIPPED, 1, 0, 9, 2),
        JournalEntry(1, LEFT_OUT, 1, 0, 16, 3),
        JournalEntry(1, OVER, 1, 0, 19, 0),
    ]
    found = count(entries, 19, is_followed=False)
    assert (found.before, found.once, found.missing.count) == (4, 10, 0)
    assert (found.skipped, found.left_out) == (Kind(2, (9, 10)), Kind(3, (16, 17, 18)))


def test_a_stream_has_as_many_samples_as_it_had_at_its_end() -> None:
    assert count([entry(0, 8)], None, is_followed=False).samples is None
    ended = [entry(0, 8), JournalEntry(1, OVER, 1, 0, 8, 0)]
    assert count(ended, None, is_followed=False).samples == 8


def test_epochs_whose_entries_are_not_all_kept_are_not_counted() -> None:
    later = entry(0, 8)._replace(epoch=3)
    marks = [JournalEntry(1, FORGOTTEN, -1, 2, 0, 0)]
    assert list(by_epoch([*marks, entry(0, 8)._replace(epoch=2), later])) == [(1, 3)]


parts = st.tuples(st.integers(0, 30), st.integers(1, 12))


@settings(deadline=None, max_examples=200)
@given(st.lists(parts, max_size=12), st.booleans())
def test_counts_are_those_of_counting_one_by_one(
    chosen: list[tuple[int, int]], is_followed: bool
) -> None:
    samples = 42
    entries = [entry(at, at + size, serial) for serial, (at, size) in enumerate(chosen)]
    times = Counter(p for at, size in chosen for p in range(at, at + size))
    furthest = max((at + size for at, size in chosen), default=0)
    found = count(entries, samples, is_followed=is_followed)
    assert found.once == sum(times[p] == 1 for p in range(samples))
    twice = [p for p in range(samples) if times[p] > 1]
    assert found.repeated == Kind(len(twice), tuple(twice[:5]))
    end = samples if is_followed else furthest
    missing = [p for p in range(end) if not times[p]]
    assert found.missing == Kind(len(missing), tuple(missing[:5]))
    assert found.to_come == samples - end


def test_where_a_sample_stands_at_several_positions_samples_are_counted() -> None:
    order = np.array([7, 7, 3, 9, 3, 5, 1, 1])
    found = count([entry(0, 4)], 8, is_followed=False, order=order)
    assert (found.samples, found.once, found.repeated) == (5, 2, Kind(1, (7,)))
    assert (found.to_come, found.missing.count) == (2, 0)  # 3 has come, and will once more
    found = count([entry(0, 4)], 8, is_followed=True, order=order)
    assert (found.to_come, found.missing) == (0, Kind(2, (1, 5)))
