"""Where the time of a batch goes, and how many workers keep up: measured on real workers."""

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.bad_data_ranks:"


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_tell_what_making_their_batches_took_wherever_it_was_made(workers: int) -> None:
    (rows,) = run_ranks(1, RANKS + "records", workers)
    (facts,) = [values for kind, values in rows if kind == "loader"]
    steps = [values for kind, values in rows if kind == "step"]
    assert (facts["workers"], facts["pinned"], len(steps)) == (workers, 0, 4)
    for values in steps:
        assert values["loader"] == facts["loader"]
        assert values["batches"] == 1
        # 16 items of 5 ms each, which wait and do not compute.
        assert values["fetch_s"] >= 0.08
        assert values["making_cpu_s"] < values["fetch_s"]
        assert 0 < values["collate_s"] < values["fetch_s"]
        assert ("copy_s" in values) == (workers > 0)
    if not workers:  # then the loop waits for all of it
        assert all(values["data_s"] >= values["fetch_s"] for values in steps)


def test_a_probe_runs_workers_and_leaves_loop_dataset_and_random_numbers_as_they_were() -> None:
    (seen,) = run_ranks(1, RANKS + "probes")
    assert (seen["unmoved"], seen["same"], seen["children"]) == (True, True, 0)
    (none, alone_s), (one, one_s), (four, four_s) = seen["rows"]
    assert (none, one, four) == (0, 1, 4)
    assert min(alone_s, one_s) >= 4 * 0.005  # what waits is shared, so that no load hides it
    assert four_s < one_s
    assert seen["parts"]["fetch"] >= 4 * 0.005
    assert seen["table"].splitlines()[0].split() == ["workers", "s", "a", "batch"]
    assert "workers 0 to 4: " in seen["sentence"]
    assert "Use num_workers=4." in seen["sentence"]


def test_a_batch_is_pinned_inside_what_it_travels_in() -> None:
    ((batch, took_ns),) = run_ranks(1, RANKS + "pins")
    assert batch == "pinned"
    assert took_ns > 0
