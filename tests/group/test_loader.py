"""The loader on real ranks: every sample once, the same batches anywhere, exact resumes."""

from collections import Counter
from functools import cache
from typing import Any

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.loader_ranks:"


def together(per_rank: list[list[list[int]]]) -> list[list[int]]:
    """Return the global batches, from each rank's parts of them."""
    return [[i for part in parts for i in part] for parts in zip(*per_rank, strict=True)]


@cache
def undisturbed() -> list[list[list[int]]]:
    """Return the global batches of three epochs, by a loop that nothing stops."""
    (epochs,) = run_ranks(1, RANKS + "epochs", 48, 12, 3, {"seed": 7})
    return [together([epoch]) for epoch in epochs]


def test_every_sample_comes_once_an_epoch_in_parts_that_differ_by_one_at_most() -> None:
    per_rank = run_ranks(3, RANKS + "epochs", 32, 10, 2, {})
    for epoch in range(2):
        parts = [ranks[epoch] for ranks in per_rank]
        batches = together(parts)
        assert [len(batch) for batch in batches] == [10, 10, 12]  # 2 left for 3 ranks joined
        assert sorted(i for batch in batches for i in batch) == list(range(32))
        for split in zip(*parts, strict=True):
            assert max(map(len, split)) - min(map(len, split)) <= 1


def test_global_batches_are_the_same_on_any_number_of_ranks() -> None:
    alone, two, four = (
        [together([rank[epoch] for rank in run]) for epoch in range(2)]
        for run in (run_ranks(n, RANKS + "epochs", 40, 8, 2, {}) for n in (1, 2, 4))
    )
    assert alone == two == four
    assert alone[0] != alone[1]


def test_the_order_follows_from_the_seed() -> None:
    (zero,), (again,), (one,) = (
        run_ranks(1, RANKS + "epochs", 20, 5, 2, {"seed": seed}) for seed in (0, 0, 1)
    )
    assert zero == again
    assert not {str(epoch) for epoch in zero} & {str(epoch) for epoch in one}


def test_without_shuffle_the_order_is_the_datasets_and_drop_last_drops() -> None:
    per_rank = run_ranks(2, RANKS + "epochs", 11, 4, 1, {"shuffle": False, "drop_last": True})
    assert together([rank[0] for rank in per_rank]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("before", "after", "workers"),
    [(2, 3, 0), (2, 1, 2), pytest.param(4, 2, 0, marks=pytest.mark.slow)],
)
def test_a_loop_resumes_in_mid_epoch_on_another_number_of_ranks(
    before: int, after: int, workers: int
) -> None:
    unbroken = undisturbed()
    stopped = run_ranks(before, RANKS + "stop_after", 48, 12, 2, workers)
    states = [state for _, state in stopped]
    assert states == [states[0]] * before
    assert states[0]["consumed"] == 24  # what the loop was given, not what workers have fetched
    resumed = run_ranks(after, RANKS + "go_on", 48, 12, states[0])
    seen = together([part for part, _ in stopped]) + together([rest for _, rest, _, _ in resumed])
    assert seen == unbroken[1]
    assert together([epoch for _, _, epoch, _ in resumed]) == unbroken[2]
    assert [(left, length) for left, _, _, length in resumed] == [(2, 4)] * after


def test_weighted_parts_make_the_same_global_batches_and_resume_on_other_weights() -> None:
    unbroken = undisturbed()
    stopped = run_ranks(3, RANKS + "stop_after", 48, 12, 2, 0, [1, 0.5, 0.5])
    assert [[len(part) for part in parts] for parts, _ in stopped] == [[6, 6], [3, 3], [3, 3]]
    assert [state["consumed"] for _, state in stopped] == [24] * 3
    resumed = run_ranks(2, RANKS + "go_on", 48, 12, stopped[0][1], [0.1, 1])
    assert [[len(part) for part in rest] for _, rest, _, _ in resumed] == [[1, 1], [11, 11]]
    seen = together([part for part, _ in stopped]) + together([rest for _, rest, _, _ in resumed])
    assert seen == unbroken[1]
    assert together([epoch for _, _, epoch, _ in resumed]) == unbroken[2]


def test_weighed_gradients_of_unequal_parts_are_those_of_the_whole_batch() -> None:
    ranks = run_ranks(2, RANKS + "weighted_ways")
    for way in ("ddp, step", "zero3, step", "ddp, share"):
        assert [rank[way]["sizes"] for rank in ranks] == [[8, 8, 5], [2, 2, 1]]
        assert [rank[way]["difference"] < 1e-12 for rank in ranks] == [True, True]
    # A plain loop averages the ranks as if all were equally large.
    assert [rank["ddp, plain"]["difference"] > 1e-5 for rank in ranks] == [True, True]


def test_a_state_taken_at_the_end_of_an_epoch_resumes_with_the_next() -> None:
    ((_, state),) = run_ranks(1, RANKS + "stop_after", 12, 4, 3, 0)
    ((left, first, _, _),) = run_ranks(1, RANKS + "go_on", 12, 4, state)
    ((*_, third),) = run_ranks(1, RANKS + "epochs", 12, 4, 3, {"seed": 7})
    assert (left, first) == (3, third)


def test_samples_too_few_for_more_ranks_are_left_out_once_and_all_ranks_go_on() -> None:
    state = {"epoch": 0, "consumed": 10, "seed": 0, "samples": 12}
    resumed = run_ranks(3, RANKS + "go_on", 12, 5, state)
    epoch = together([first for _, first, _, _ in resumed])
    assert sorted(i for batch in epoch for i in batch) == list(range(12))


def test_a_loop_that_was_left_is_followed_by_a_fresh_epoch_and_a_look_is_not() -> None:
    (seen,) = run_ranks(1, RANKS + "leave_loops")
    assert seen == {
        "looks alike": True,
        "epoch after looks": 0,
        "left": 4,
        "epoch": 2,  # 0 was left, 1 ran whole
        "fresh": list(range(12)),
        "another order": True,
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_another_one_ended_says_so(workers: int) -> None:
    (seen,) = run_ranks(1, RANKS + "two_loops", workers)
    assert "This loop over the loader has ended, for another one over it began." in seen.pop("told")
    assert seen == {
        "inner": list(range(8)),
        "another epoch": True,
        "over": "over",
        "newest": list(range(8)),
    }


def test_workers_draw_other_numbers_on_each_rank_and_in_each_epoch() -> None:
    drawn = run_ranks(2, RANKS + "noises", 2)
    numbers = [number for rank in drawn for number in rank]
    assert len(set(numbers)) == len(numbers) == 16


def test_workers_draw_by_the_place_of_a_batch_whatever_their_number_and_what_they_made() -> None:
    drawn: dict[str, Any] = {}
    for kind in ("samples", "collated", "a generator"):
        runs = [run_ranks(2, RANKS + "draws", kind, workers, 100, None) for workers in (1, 2)]
        stopped = run_ranks(2, RANKS + "draws", kind, 2, 9, None)
        resumed = run_ranks(2, RANKS + "draws", kind, 1, 100, stopped[0][1])
        drawn[kind] = unbroken = [seen for seen, _ in runs[0]]
        assert unbroken == [seen for seen, _ in runs[1]]
        pairs = zip(stopped, resumed, strict=True)
        assert unbroken == [before + after for (before, _), (after, _) in pairs]
        numbers = [n for seen in unbroken for batch in seen for sample in batch for n in sample[1:]]
        assert len(set(numbers)) == len(numbers) == 2 * 24 * 3
    assert drawn["samples"] != drawn["a generator"]


def test_coverage_counts_samples_or_says_that_it_counts_positions() -> None:
    ranks = run_ranks(2, RANKS + "coverages")
    _, epoch, verdict = ranks[0]["weighted"]
    times = Counter(sample for one in ranks for sample in one["weighted"][0])
    assert epoch.samples == len(times)
    assert epoch.once == sum(number == 1 for number in times.values())
    assert epoch.repeated == len(times) - epoch.once > 0
    assert set(epoch.ids["repeated"]) <= {sample for sample, n in times.items() if n > 1}
    assert (epoch.missing, epoch.places, epoch.is_exact) == (0, 24, False)
    assert verdict == f"0 samples missing, {epoch.repeated} given twice or more."
    for case, words in (("gone", "sampler gives samples more"), ("split", "in dataset.indices,")):
        _, epoch, verdict = ranks[1][case]
        assert words in epoch.unsure
        assert (epoch.is_exact, epoch.is_by_position) == (False, True)
        assert verdict == "Which samples came how often is not known."


def test_loading_leaves_the_global_generator_alone() -> None:
    assert run_ranks(1, RANKS + "leaves_the_global_generator") == [True]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_ends_alike_on_all_ranks_and_is_transformed_on_its_own(workers: int) -> None:
    ranks = run_ranks(3, RANKS + "streams", workers)
    for told in ranks:
        assert told["epoch"] == 2
        assert "no length" in told["__len__"]
        assert "does not know how many" in told["batches_left"]
    for epoch in range(2):
        batches = together([told["batches"][epoch] for told in ranks])
        assert batches == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22, 24]]  # 1 left joined


@pytest.mark.parametrize("kind", ["weighted", "random", "set_epoch"])
def test_a_samplers_order_is_that_of_all_ranks_and_resumes_on_others(kind: str) -> None:
    ((unbroken, _),) = run_ranks(1, RANKS + "own_order", kind, 100, None)
    stopped = run_ranks(2, RANKS + "own_order", kind, 6, None)
    resumed = run_ranks(3, RANKS + "own_order", kind, 100, stopped[0][1])
    seen = together([part for part, _ in stopped]) + together([part for part, _ in resumed])
    assert seen == unbroken
    size = len(unbroken) // 2
    assert sorted(map(sorted, unbroken[:size])) != sorted(map(sorted, unbroken[size:]))


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    return run_ranks(2, RANKS + "refusals")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("batch_size", ["takes no batch_size", "of all ranks together: 4 here for 2 per rank"]),
        ("batch_sampler", ["takes no batch_sampler", "seed and epoch"]),
        ("a rank's part", ["gives a rank's part", "sampler of the whole order"]),
        ("an iterator", ["list_iterator is no sampler with a length", "__len__"]),
        ("any order", ["AnyOrder does not follow from seed and epoch", "set_epoch"]),
        ("its generator", ["RandomSampler draws", "leave out the sampler's generator="]),
        ("of a stream", ["for datasets with items by index", "leave it out"]),
        ("generator", ["generator can be iterated once", "without calling it"]),
        ("no data", ["cannot read this int", "an iterable"]),
        ("no order", ["no in_order=False", "leave it out"]),
        ("small batch", ["global_batch=1 gives 2 ranks nothing", "multiple of 2"]),
        ("float batch", ["global_batch=4.0"]),
        ("few samples", ["1 sample:", "2 ranks"]),
        ("another dataset", ["9 samples", "has 8"]),
        ("three weights", ["3 weights", "2 parts", "loader.weights = [1, 1]"]),
        ("no weight", ["weights=[1, 0]", "more than 0"]),
        ("a word", ["weights='measure' are not valid weights", '"measured"']),
    ],
)
def test_wrong_use_is_refused_in_words(
    refusals: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    for texts in refusals:
        assert [word for word in words if word not in texts[case]] == []
