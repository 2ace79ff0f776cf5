"""Every sample once: the cut of an epoch and of a batch, for all sizes."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from nbdist.engine.data.batches import Shard, cut, mix, part, shares

RANKS = st.integers(1, 9)


WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)


def all_parts(
    ends: Sequence[int], start: int, ranks: int, weights: list[float] | None = None
) -> list[list[range]]:
    """Return the parts of each batch, by batch and rank."""
    starts = [start, *ends[:-1]]
    return [
        [part(a, b, Shard(rank, ranks), weights) for rank in range(ranks)]
        for a, b in zip(starts, ends, strict=True)
    ]


@given(samples=st.integers(0, 200), extra=st.integers(0, 20), ranks=RANKS)
def test_every_sample_comes_once_and_no_rank_is_without(
    samples: int, extra: int, ranks: int
) -> None:
    samples += ranks
    batches = all_parts(cut(samples, 0, ranks + extra, ranks, drop_last=False), 0, ranks)
    seen = [i for parts in batches for positions in parts for i in positions]
    assert seen == list(range(samples))
    for parts in batches:
        sizes = [len(positions) for positions in parts]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@given(samples=st.integers(0, 200), extra=st.integers(0, 20), weights=WEIGHTS)
def test_every_sample_comes_once_with_any_weights(
    samples: int, extra: int, weights: list[float]
) -> None:
    ranks = len(weights)
    samples += ranks
    ends = cut(samples, 0, ranks + extra, ranks, drop_last=False)
    batches = all_parts(ends, 0, ranks, weights)
    assert [i for parts in batches for one in parts for i in one] == list(range(samples))
    assert all(len(one) >= 1 for parts in batches for one in parts)


@given(samples=st.integers(0, 300), weights=WEIGHTS)
def test_parts_are_within_one_sample_of_proportional(samples: int, weights: list[float]) -> None:
    samples += len(weights)
    sizes = shares(samples, tuple(weights))
    assert sum(sizes) == samples
    # Whose due is less than one sample gets one, and the others share the rest.
    due, bound = dict(enumerate(weights)), samples
    while small := {i for i, w in due.items() if w * bound / sum(due.values()) < 1 - 1e-9}:
        assert all(sizes[i] == 1 for i in small)
        due = {i: w for i, w in due.items() if i not in small}
        bound -= len(small)
    for i, weight in due.items():
        assert abs(sizes[i] - weight * bound / sum(due.values())) < 1 + 1e-9


@given(samples=st.integers(0, 200), ranks=RANKS, weight=st.floats(1e-3, 1e3))
def test_equal_weights_are_none(samples: int, ranks: int, weight: float) -> None:
    samples += ranks
    equal = all_parts([samples], 0, ranks)
    assert all_parts([samples], 0, ranks, [weight] * ranks) == equal


@given(samples=st.integers(0, 300), weights=WEIGHTS)
def test_a_larger_weight_never_gets_less(samples: int, weights: list[float]) -> None:
    sizes = shares(samples + len(weights), tuple(weights))
    by_weight = sorted(zip(weights, sizes, strict=True))
    for (light, few), (heavy, many) in itertools.pairwise(by_weight):
        assert few <= many or light == heavy


def test_half_a_weight_is_half_the_work() -> None:
    assert shares(12, (1.0, 0.5)) == (8, 4)
    assert shares(13, (1.0, 0.5)) == (9, 4)
    assert shares(4, (1.0, 1.0, 0.01)) == (2, 1, 1)


@given(samples=st.integers(1, 200), batch=st.integers(1, 20), ranks=RANKS)
def test_dropping_the_last_leaves_only_full_batches(samples: int, batch: int, ranks: int) -> None:
    ends = cut(samples, 0, batch, ranks, drop_last=True)
    assert list(ends) == list(range(batch, samples + 1, batch))


@given(data=st.data(), samples=st.integers(10, 200), batch=st.integers(9, 30), ranks=RANKS)
def test_a_resume_on_other_ranks_gives_the_rest_of_the_same_batches(
    data: st.DataObject, samples: int, batch: int, ranks: int
) -> None:
    before = cut(samples, 0, batch, ranks, drop_last=False)
    at = data.draw(st.integers(0, len(before)))
    start = before[at - 1] if at else 0
    others = data.draw(RANKS)
    after = cut(samples, start, batch, others, drop_last=False)
    full = [end for end in before[at:] if end % batch == 0 and samples - end >= max(ranks, others)]
    assert after[: len(full)] == full
    left_out = samples - (after[-1] if after else start)
    assert left_out == 0 or (not after and left_out < others)


def test_a_remainder_smaller_than_the_ranks_joins_the_batch_before() -> None:
    assert list(cut(23, 0, 10, 4, drop_last=False)) == [10, 23]
    assert list(cut(24, 0, 10, 4, drop_last=False)) == [10, 20, 24]


def test_a_seed_depends_on_every_number_and_on_their_order() -> None:
    assert len({mix(0, 1), mix(1, 0), mix(0, 1, 0), mix(1, 1), mix(0, 0)}) == 5
    assert all(0 <= mix(i, i) < 2**63 for i in range(1000))


def test_a_seed_is_the_same_on_every_machine() -> None:
    assert mix(0, 1) == 9017893900260303862
