"""Samples that cannot be loaded, and workers that die: named, left out or retried."""

from pathlib import Path

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.bad_data_ranks:"


@pytest.mark.parametrize(("workers", "kind"), [(0, "one"), (2, "one"), (2, "many")])
def test_a_bad_sample_is_named_and_the_loop_goes_on_with_its_batch(workers: int, kind: str) -> None:
    first, second = run_ranks(2, RANKS + "raises", workers, kind)
    # Of batch 8 ... 15 the second rank has 12 ... 15, of which 13 is bad at first.
    assert first["seen"] == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]
    assert second["seen"] == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23]]
    assert (first["consumed"], second["consumed"]) == (-1, 8)
    origin = " of part-1.parquet, row group 0" if kind == "many" else ""
    what, why, do = second["told"].splitlines()
    assert what == f"Sample 13{origin} could not be loaded on rank 1: ValueError: bad pixel in 13"
    assert "bad_data_ranks.py:" in why
    assert "%dist retry" in do
    assert 'on_bad="skip"' in do
    assert "bad pixel in 13" in second["cause"]


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_samples_are_named_and_the_other_parts_stay_as_they_are(workers: int) -> None:
    first, second = run_ranks(2, RANKS + "skips", workers, [1, 13, 20, 21, 22, 23])
    assert first["seen"] == [[0, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]
    assert second["seen"] == [[4, 5, 6, 7], [12, 14, 15], [16]]  # of its own nothing was left
    assert first["ends"] == second["ends"] == [8, 16, 24]
    assert first["skipped"] == [(0, 1, "ValueError: bad pixel in 1")]
    assert [sample for _, sample, _ in second["skipped"]] == [13, 20, 21, 22, 23]
    # Sample 16 came twice: it stood in for a part of which nothing was left.
    assert first["covered"] == second["covered"] == [(17, 6, 0, 1)]
    (notice,) = second["notices"]
    assert "rank 1 left out 5 samples of the dataset (13, 20, 21, 22, 23)" in notice


@pytest.mark.parametrize("persistent", [False, True])
def test_killed_workers_are_replaced_and_every_sample_comes_once_in_order(persistent: bool) -> None:
    (seen,) = run_ranks(1, RANKS + "loses_workers", persistent)
    assert seen["epochs"] == seen["expected"]
    assert len(seen["lines"]) == 2
    assert "was killed by SIGKILL. The loader started others" in seen["lines"][0]
    assert seen["left"] == 0


def test_a_worker_that_dies_each_time_is_one_error_at_the_last_boundary() -> None:
    (seen,) = run_ranks(1, RANKS + "dies_at", "kill", "")
    # The other worker's batch comes first, or not at all where that worker is ended before.
    assert seen["seen"] in ([], [list(range(8))])
    assert seen["consumed"] == sum(map(len, seen["seen"]))
    assert len(seen["lines"]) == 3
    what, why, do = seen["told"].splitlines()
    assert what.startswith("The loader's workers ended 4 times on rank 0: worker ")
    assert what.endswith("was killed by SIGKILL.")
    assert "memory" in why
    assert "%dist retry" in do


def test_a_worker_killed_while_it_holds_a_lock_of_all_is_replaced(tmp_path: Path) -> None:
    once = str(tmp_path / "killed")
    (seen,) = run_ranks(1, RANKS + "dies_at", "kill with a lock", once)
    assert [i for batch in seen["seen"] for i in batch] == list(range(24))
    assert (seen["told"], len(seen["lines"])) == ("", 1)


def test_a_worker_that_hangs_once_is_replaced_when_the_loader_has_a_timeout(tmp_path: Path) -> None:
    (seen,) = run_ranks(1, RANKS + "dies_at", "hang", str(tmp_path / "hung"))
    assert [i for batch in seen["seen"] for i in batch] == list(range(24))
    assert (seen["told"], len(seen["lines"])) == ("", 1)
    assert "workers gave no batch for 1 s" in seen["lines"][0]


@pytest.mark.parametrize("workers", [0, 2])
def test_users_see_their_own_dataset_samples_and_collate_function(workers: int) -> None:
    (seen,) = run_ranks(1, RANKS + "seen_by_users", workers)
    name = "Plain" if workers else ""
    assert seen["batches"] == [("list", [0, 1, 2, 3], {name}), ("list", [4, 5, 6, 7], {name})]
    assert (seen["same"], seen["wrapped"]) == (True, "DataLoader")
