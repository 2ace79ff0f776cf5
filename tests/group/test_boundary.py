"""Ranks that a fault leaves one step apart: they go on together, or are refused, never silently."""

from functools import cache
from typing import Any

import pytest

from tests.group import boundary_ranks as ranks_
from tests.group import faults
from tests.group.engines import Cluster, cluster
from tests.lifecycle.kernels import wait_for

STEPS, BREAK_AT = 6, 3


@cache
def unbroken(kind: str, n: int, steps: int = STEPS) -> list[str]:
    with cluster(n) as ranks:
        ranks.run(ranks_.build, kind)
        ranks.run(ranks_.train, steps)
        fingerprints: list[str] = ranks.run(ranks_.fingerprint)
        return fingerprints


def fail_between_backward_and_step(
    ranks: Cluster,
    breaker: int = 1,
    place: str = "step",
    steps: int = STEPS,
    break_at: int = BREAK_AT,
) -> None:
    ranks.post(ranks_.train, steps, break_at, breaker, place)
    ranks.engines[breaker].result()
    others = [engine for engine in ranks.engines if engine.rank != breaker]
    wait_for(
        lambda: all(engine.now(ranks_.has_ended_backward, break_at) for engine in others),
        "the other ranks have ended the backward",
    )
    for engine in ranks.engines:
        engine.now(faults.abort)
    for engine in others:
        engine.result()


@pytest.mark.parametrize("kind", ["ddp", "laid by nbdist"])
@pytest.mark.parametrize("breaker", [0, 1])
def test_a_rank_that_lost_a_step_copies_it_and_training_is_bit_equal(
    kind: str, breaker: int
) -> None:
    with cluster(3) as ranks:
        ranks.run(ranks_.build, kind)
        fail_between_backward_and_step(ranks, breaker)
        agreed = ranks.run(ranks_.recover, 1)
        assert ranks.run(ranks_.steps) == [BREAK_AT + 1] * 3
        line, followed, cut = agreed[0]
        assert cut.startswith(f"On rank {breaker} the code between the optimizer's step 4 and the")
        assert followed.startswith(f"Rank {breaker} took scheduler (StepLR)")
        assert line == (
            f"Rank {breaker} had lost step 4: it copied the model (Sequential) and its optimizer "
            f"from rank {0 if breaker else 1}."
        )
        ranks.run(ranks_.train, STEPS)
        found = ranks.run(ranks_.fingerprint)
    assert found == unbroken(kind, 3)


@pytest.mark.parametrize(
    "kind",
    [
        "fsdp",
        "pipeline",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("tensor parallel", "zero")),
    ],
)
def test_sharded_ranks_one_step_apart_roll_back_together_and_training_is_bit_equal(
    kind: str,
) -> None:
    with cluster(2) as ranks:
        ranks.run(ranks_.build, kind)
        fail_between_backward_and_step(ranks)
        agreed = ranks.run(ranks_.recover, 1)
        assert ranks.run(ranks_.steps) == [1] * 2
        assert "were one step apart: rolled back" in agreed[0][0]
        assert "to step 1 (snapshot" in agreed[0][0]
        ranks.run(ranks_.train, STEPS)
        found = ranks.run(ranks_.fingerprint)
    assert found == unbroken(kind, 2)


@pytest.mark.parametrize("kind", [pytest.param("LocalSGD", marks=pytest.mark.slow), "DiLoCo"])
def test_ranks_that_train_apart_go_back_each_to_its_own_model_and_training_is_bit_equal(
    kind: str,
) -> None:
    with cluster(2) as ranks:
        ranks.run(ranks_.schedule_snapshots, 0.0)
        ranks.run(ranks_.build, kind)
        ranks.run(ranks_.train, 18)
        newest = ranks.run(ranks_.snapshots_held)
        ranks.post(ranks_.train, 24, 21)  # rank 1 fails in the midst of a round
        ranks.engines[1].result()
        for engine in ranks.engines:
            engine.now(faults.abort)
        assert ranks.engines[0].result() == 23  # waited for the end of the round
        agreed = ranks.run(ranks_.recover, 1)
        stood = ranks.run(ranks_.steps)
        ranks.run(ranks_.train, 24)
        found = ranks.run(ranks_.fingerprint)

    # Where all are equal; the one of step 20 may have come since.
    assert stood[0] == stood[1]
    assert stood[0] in {newest[0][0], 20}
    assert stood[0] % 4 == 0
    assert "were at different steps: rolled back" in agreed[0][0]
    assert found == unbroken(kind, 2, 24)


@pytest.mark.slow
def test_ranks_that_train_apart_without_a_snapshot_are_made_equal_and_this_is_said() -> None:
    with cluster(2) as ranks:
        ranks.run(ranks_.without_snapshots)
        ranks.run(ranks_.build, "LocalSGD")
        fail_between_backward_and_step(ranks)
        agreed = ranks.run(ranks_.recover, 1)
        stood = ranks.run(ranks_.steps)
        ranks.run(ranks_.train, 8)
        models = ranks.run(ranks_.parameters)

    # Rank 0 was freed in the averaging that ends its fourth step; rank 1 stands after its third.
    assert "rank 0 copied the model and its optimizer from rank 1" in agreed[0][0]
    assert "Training is valid, but differs from an undisturbed run" in agreed[0][0]
    assert stood == [3, 3]
    assert models[0] == models[1]  # a round has ended


@pytest.mark.slow
def test_scheduled_snapshots_are_of_one_step_and_what_follows_them_can_be_made_again() -> None:
    steps, break_at = 90, 80
    with cluster(3) as ranks:
        ranks.run(ranks_.schedule_snapshots, 0.05)
        ranks.run(ranks_.build, "fsdp")
        held = [ranks.run(train_and_look, until) for until in (30, 60)]
        ranks.run(ranks_.schedule_snapshots, 1e9)
        held.append(ranks.run(train_and_look, 70))
        fail_between_backward_and_step(ranks, steps=steps, break_at=break_at)
        agreed = ranks.run(ranks_.recover, 1)
        stood = ranks.run(ranks_.steps)
        ranks.run(ranks_.train, steps)
        found = ranks.run(ranks_.fingerprint)

    newest = [of_ranks[0][0] for of_ranks in held]
    assert all(of_rank[0] == newest[i] for i, of_ranks in enumerate(held) for of_rank in of_ranks)
    assert 1 < newest[0] < newest[1] <= newest[2] < 70
    assert stood == [newest[2]] * 3
    count = break_at + 1 - newest[2]
    assert f"rolled back {count} steps, to step {newest[2]} (snapshot" in agreed[0][0]
    assert found == unbroken("fsdp", 3, steps)


def train_and_look(until: int) -> list[int]:
    ranks_.train(until)
    return ranks_.snapshots_held()


def test_a_scheduler_that_one_rank_did_not_step_is_copied() -> None:
    with cluster(2) as ranks:
        ranks.run(ranks_.build, "ddp")
        fail_between_backward_and_step(ranks, place="after step")
        agreed = ranks.run(ranks_.recover, 1)
        ranks.run(ranks_.train, STEPS)
        found = ranks.run(ranks_.fingerprint)
    (line,) = agreed[0]
    assert line == (
        "Rank 1 took scheduler (StepLR) and step from rank 0, where step 4 was followed by all "
        "that belongs to it."
    )
    assert found == unbroken("ddp", 2)


def test_sharded_ranks_one_step_apart_without_a_snapshot_are_refused_and_told_what_to_do() -> None:
    with cluster(2) as ranks:
        ranks.run(ranks_.without_snapshots)
        ranks.run(ranks_.build, "fsdp")
        fail_between_backward_and_step(ranks)
        agreed = ranks.run(ranks_.recover, 1)
        errors = ranks.run(ranks_.forward_error)
        status = ranks.now(ranks_.snapshot_status)

        assert "no snapshot is common to all of them" in agreed[0][0]
        for error in errors:
            assert "Sequential cannot be trained on: its state is not whole." in error
            assert "Do:  build it again, or nbdist.restore() a checkpoint" in error
        assert all("more than half of the" in said["refused"] for said in status)

        ranks.run(ranks_.build, "fsdp")
        assert ranks.run(ranks_.train, 2) == [2, 2]


def test_ranks_that_train_on_their_own_are_never_touched() -> None:
    with cluster(2) as ranks:
        ranks.run(ranks_.build, "independent")
        ranks.engines[0].post(ranks_.train, 5)
        ranks.engines[1].post(ranks_.train, 2)
        ranks.results()
        before = ranks.run(ranks_.fingerprint_of_model)
        agreed = ranks.run(ranks_.recover, 1)

        assert agreed == [[], []]
        assert ranks.run(ranks_.fingerprint_of_model) == before
        assert ranks.run(ranks_.steps) == [5, 2]


def test_a_fault_in_the_midst_of_a_recovery_begins_it_again_with_the_next_generation() -> None:
    with cluster(3) as ranks:
        ranks.run(ranks_.build, "ddp")
        fail_between_backward_and_step(ranks)
        ranks.run(ranks_.break_the_next_copy)
        ranks.post(ranks_.recover_or_not, 1)
        failed = ranks.engines[1].result()
        for rank in (0, 2):
            ranks.engines[rank].now(faults.abort)
        others = [ranks.engines[rank].result() for rank in (0, 2)]
        agreed = ranks.run(ranks_.recover, 2)
        ranks.run(ranks_.train, STEPS)
        found = ranks.run(ranks_.fingerprint)

    assert failed == "Boom"
    assert others[0] in ("recovered", "released")
    assert agreed[0][0].startswith("Rank 1 had lost step 4")
    assert found == unbroken("ddp", 3)


def test_what_a_recovery_that_was_cut_off_had_copied_is_followed_by_the_rest_in_the_next() -> None:
    with cluster(3) as ranks:
        ranks.run(ranks_.build, "ddp")
        for engine, breaker in zip(ranks.engines, (0, 1, 0), strict=True):
            engine.post(ranks_.train, STEPS, BREAK_AT, breaker)
        losers, winner = ranks.engines[:2], ranks.engines[2]
        assert [engine.result() for engine in losers] == [BREAK_AT] * 2
        wait_for(lambda: winner.now(ranks_.steps) == BREAK_AT + 1, "rank 2 has stepped")
        ranks.now(faults.abort)
        winner.result()
        ranks.run(ranks_.break_the_next_copy)
        ranks.post(ranks_.recover_or_not, 1)
        assert losers[1].result() == "Boom"
        # Rank 0 has its copy, and waits for all to compare what follows it.
        wait_for(lambda: losers[0].now(ranks_.steps) == BREAK_AT + 1, "rank 0 has copied")
        ranks.now(faults.abort)
        assert [engine.result() for engine in (losers[0], winner)] == ["released"] * 2
        agreed = ranks.run(ranks_.recover, 2)
        ranks.run(ranks_.train, STEPS)
        found = ranks.run(ranks_.fingerprint)

    assert agreed[0][1].startswith("Ranks 0-1 took scheduler (StepLR)")
    assert found == unbroken("ddp", 3)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensor parallel", "zero"])
def test_a_recovery_that_was_cut_off_before_what_follows_is_made_whole_by_the_next(
    kind: str,
) -> None:
    with cluster(2) as ranks:
        ranks.run(ranks_.build, kind)
        fail_between_backward_and_step(ranks)
        ranks.run(ranks_.break_what_follows)
        ranks.post(ranks_.recover_or_not, 1)
        assert ranks.engines[1].result() == "Boom"
        ranks.engines[0].now(faults.abort)
        assert ranks.engines[0].result() == "released"
        ranks.run(ranks_.recover, 2)
        ranks.run(ranks_.train, STEPS)
        found = ranks.run(ranks_.fingerprint)

    assert found == unbroken(kind, 2)


def run_cells(break_at: int, place: str, between: int = 0) -> tuple[list[Any], list[Any], Any]:
    """Break a cell, recover if it hangs, run others, and run it again; see `run_loader_cell`.

    Returns:
        What the ranks did before, what they did again, and where the loader stood.
    """
    with cluster(2) as ranks:
        ranks.run(ranks_.build, "laid by nbdist")
        ranks.post(ranks_.run_loader_cell, 2, break_at, place)
        seen = [ranks.engines[1].result()]
        if break_at < len(STEPS_OF_TWO_EPOCHS):
            ranks.engines[0].now(faults.abort)
        seen.insert(0, ranks.engines[0].result())
        if break_at < len(STEPS_OF_TWO_EPOCHS):
            ranks.run(ranks_.recover, 1)
        stood = ranks.run(ranks_.loader_position)
        for other in range(between):
            ranks.run(ranks_.run_empty_cell, 2 + other, 1)
        return (
            seen,
            ranks.run(ranks_.run_loader_cell, 2, -1, place, 2 + between, 1, True),
            stood,
        )


STEPS_OF_TWO_EPOCHS = range(16)


@cache
def unbroken_cell() -> list[Any]:
    with cluster(2) as ranks:
        ranks.run(ranks_.build, "laid by nbdist")
        return ranks.run(ranks_.run_loader_cell, 2, -1)


@pytest.mark.parametrize("between", [0, 2])
def test_loaders_go_back_to_the_boundary_and_the_cell_goes_on_there_when_it_runs_again(
    between: int,
) -> None:
    expected = unbroken_cell()
    seen, again, stood = run_cells(11, "before backward", between)

    assert stood == [[1, 24], [1, 24]]
    for rank in range(2):
        trained = seen[rank]["trained"] + again[rank]["trained"]
        assert trained == expected[rank]["trained"]
        assert again[rank]["parameters"] == expected[rank]["parameters"]


@pytest.mark.parametrize("break_at", [0, 8])
def test_a_step_copied_at_the_beginning_of_an_epoch_is_not_made_again(break_at: int) -> None:
    expected = unbroken_cell()
    seen, again, _ = run_cells(break_at, "before step")

    assert seen[0]["trained"] + again[0]["trained"] == expected[0]["trained"]
    assert len(again[1]["trained"]) == len(again[0]["trained"])
    for rank in range(2):
        assert again[rank]["parameters"] == expected[rank]["parameters"]


@pytest.mark.parametrize("between", [0, 2])
def test_a_cell_that_failed_on_one_rank_after_its_last_step_trains_nothing_again(
    between: int,
) -> None:
    seen, again, _ = run_cells(len(STEPS_OF_TWO_EPOCHS), "", between)

    for rank in range(2):
        assert len(seen[rank]["trained"]) == len(STEPS_OF_TWO_EPOCHS)
        assert again[rank] == {"trained": [], "parameters": seen[rank]["parameters"]}


def test_an_interrupt_in_an_optimizers_step_waits_for_its_end() -> None:
    with cluster(1) as ranks:
        for _ in range(2):
            (found,) = ranks.run(ranks_.interrupt_in_a_step, 1)
            assert found == {
                "ended": "interrupted",
                "parameters": [1.0, 1.0],
                "is torn": False,
                "strikes between steps": True,
            }


@pytest.mark.parametrize(("times", "seconds"), [(2, 0.0), (1, 5.0)])
def test_a_second_interrupt_and_a_long_step_are_not_waited_for(times: int, seconds: float) -> None:
    with cluster(1) as ranks:
        (found,) = ranks.run(ranks_.interrupt_in_a_step, times, seconds)
        assert (found["ended"], found["parameters"]) == ("interrupted", [1.0, 0.0])
        assert found["is torn"]
        assert found["strikes between steps"]
