from nbdist.engine import agreement
from nbdist.engine.agreement import Report, decide


def replicated(*steps: int, torn: bool = False, ranks: tuple[int, ...] = (0, 1, 2)) -> Report:
    return Report("replicated", "GPT", ranks, "abc", tuple(steps), torn)


def sharded(step: int, *snapshots: int, ranks: tuple[int, ...] = (0, 1)) -> Report:
    held = tuple(((s,), 8.0) for s in snapshots)
    return Report("sharded", "GPT", ranks, "abc", (step,), False, held)


def test_ranks_at_the_same_step_do_nothing() -> None:
    assert decide({rank: [replicated(4)] for rank in range(3)}, []) == []


def test_who_lost_a_step_copies_from_the_lowest_of_the_most_advanced_ranks() -> None:
    (found,) = decide({0: [replicated(40)], 1: [replicated(41)], 2: [replicated(41)]}, [])

    assert (found.action, found.source, found.behind, found.steps) == ("copy", 1, (0,), (41,))
    assert found.lost == 0
    assert found.line == (
        "Rank 0 had lost step 41: it copied the model (GPT) and its optimizer from rank 1."
    )


def test_a_scheduler_that_is_behind_counts_as_well() -> None:
    (found,) = decide({0: [replicated(5, 4)], 1: [replicated(5, 5)], 2: [replicated(5, 5)]}, [])

    assert (found.source, found.behind) == (1, (0,))


def test_a_rank_torn_in_the_midst_of_its_step_is_no_source() -> None:
    reports = {0: [replicated(4, torn=True)], 1: [replicated(4)], 2: [replicated(4)]}

    (found,) = decide(reports, [])

    assert (found.source, found.behind) == (1, (0,))


def test_where_all_are_torn_they_become_equal_and_this_is_said() -> None:
    (found,) = decide({rank: [replicated(4, torn=True)] for rank in range(3)}, [])

    assert (found.source, found.behind) == (0, (1, 2))
    assert "in the midst of an optimizer step" in found.line


def test_sharded_ranks_go_back_to_their_newest_common_snapshot() -> None:
    (found,) = decide({0: [sharded(412, 412, 400)], 1: [sharded(411, 400)]}, [])

    assert (found.action, found.steps, found.lost) == ("roll back", (400,), 12)
    assert found.line == (
        "The ranks that hold GPT were one step apart: rolled back 12 steps, to step 400 "
        "(snapshot 8 s old)."
    )


def apart(step: int, *snapshots: int, torn: bool = False) -> Report:
    held = tuple(((s,), 8.0) for s in snapshots)
    return Report("apart", "GPT", (0, 1, 2), "abc", (step,), torn, held)


def test_ranks_that_train_apart_go_back_together_each_to_its_own() -> None:
    reports = {0: [apart(21, 16, torn=True)], 1: [apart(18, 16)], 2: [apart(21, 16, torn=True)]}

    (found,) = decide(reports, [])

    assert (found.action, found.steps, found.lost) == ("roll back", (16,), 5)
    assert "were at different steps: rolled back 5 steps, to step 16" in found.line


def test_ranks_that_train_apart_without_a_common_snapshot_copy_the_most_advanced_one() -> None:
    reports = {0: [apart(3, torn=True)], 1: [apart(3, 1)], 2: [apart(2, 1)]}

    (found,) = decide(reports, [])

    assert (found.action, found.source, found.behind, found.steps) == ("copy", 1, (0, 2), (3,))
    assert "Training is sound, and not what it would have been." in found.line


def test_a_dead_rank_takes_nothing_from_those_that_train_apart() -> None:
    assert decide({0: [apart(8)], 1: [apart(8)]}, [2]) == []


def test_sharded_ranks_without_a_common_snapshot_are_refused() -> None:
    (found,) = decide({0: [sharded(3, 3)], 1: [sharded(2, 1)]}, [])

    assert (found.action, found.steps) == ("refuse", (3,))
    assert "rank 0 at step 3, rank 1 at step 2" in found.line


def test_sharded_state_that_died_with_its_rank_is_refused() -> None:
    (found,) = decide({0: [sharded(3, 3)], 1: []}, newcomers=[1])

    assert (found.action, found.lost) == ("refuse", 3)
    assert found.line.startswith("Rank 1 died with a part of GPT")


def test_survivors_agree_without_the_newcomer() -> None:
    reports = {0: [replicated(4)], 1: [replicated(3)], 2: []}

    (found,) = decide(reports, newcomers=[2])

    assert (found.source, found.behind) == (0, (1,))


def test_units_are_compared_within_their_ranks_only() -> None:
    reports = {
        0: [replicated(9, ranks=(0, 1))],
        1: [replicated(9, ranks=(0, 1))],
        2: [replicated(4, ranks=(2, 3))],
        3: [replicated(4, ranks=(2, 3))],
    }

    assert decide(reports, []) == []


def test_an_old_model_that_one_rank_still_holds_is_not_mistaken_for_the_new_one() -> None:
    reports = {
        0: [replicated(90, ranks=(0, 1)), replicated(4, ranks=(0, 1))],
        1: [replicated(4, ranks=(0, 1))],
    }

    assert decide(reports, []) == []
    assert agreement.has_unmatched(reports, [])


def test_reports_travel_as_text() -> None:
    reports = [sharded(3, 3, 1), replicated(1, 2, torn=True)]

    assert agreement.from_json(agreement.to_json(reports)) == reports
