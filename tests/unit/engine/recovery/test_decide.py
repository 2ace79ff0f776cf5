from dataclasses import replace

from nbdist.engine.recovery.decide import (
    Kept,
    ModelReport,
    decide,
    from_json,
    has_unmatched,
    to_json,
)


def replicated(
    *steps: int, torn: bool = False, ranks: tuple[int, ...] = (0, 1, 2), identity: str = "m1"
) -> ModelReport:
    parts = tuple(f"{identity}/{number}" for number in range(len(steps)))
    return ModelReport("replicated", "GPT", ranks, identity, steps, parts, identity, torn)


def sharded(
    step: int, *snapshots: int, ranks: tuple[int, ...] = (0, 1), identity: str = "o1"
) -> ModelReport:
    held = tuple(((s,), 8.0) for s in snapshots)
    return ModelReport("sharded", "GPT", ranks, identity, (step,), (identity,), snapshots=held)


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
    assert "in the middle of an optimizer step" in found.line


def test_a_lost_part_that_a_living_rank_holds_comes_from_there_and_no_step_is_lost() -> None:
    square = (0, 1, 2, 3)
    reports: dict[int, list[ModelReport]] = {
        rank: [replace(sharded(7, ranks=square), copies=(rank % 2, rank % 2 + 2))]
        for rank in (0, 2, 3)
    }

    (found,) = decide({**reports, 1: []}, [1])

    assert (found.action, found.lost) == ("tell", 0)
    assert found.line == (
        "The part of GPT that died was copied from a rank that holds the same: rank 1's from "
        "rank 3."
    )


def test_ranks_a_step_apart_go_back_before_a_lost_part_is_copied() -> None:
    square = (0, 1, 2, 3)
    reports: dict[int, list[ModelReport]] = {
        rank: [replace(sharded(step, 400, ranks=square), copies=(rank % 2, rank % 2 + 2))]
        for rank, step in ((0, 412), (2, 411), (3, 412))
    }

    back, told = decide({**reports, 1: []}, [1])

    assert (back.action, back.steps, told.action) == ("roll back", (400,), "tell")


def test_a_part_of_which_every_holder_died_is_refused_and_those_ranks_alone_are_named() -> None:
    square = (0, 1, 2, 3)
    reports: dict[int, list[ModelReport]] = {
        0: [replace(sharded(7, ranks=square), copies=(0, 2))],
        1: [],
        2: [],
        3: [],
    }

    (found,) = decide(reports, [1, 2, 3])

    assert found.action == "refuse"
    assert found.line.startswith("Ranks 1, 3 died with a part of GPT")


def test_a_lost_part_in_a_peers_memory_is_given_back_at_a_step_that_all_hold() -> None:
    four = (0, 1, 2, 3)
    reports: dict[int, list[ModelReport]] = {
        rank: [sharded(12, 10, 5, ranks=four)] for rank in (0, 2, 3)
    }
    kept = {1: Kept(2, {"o1": [((5,), 9.0)], "other": [((10,), 2.0)]})}

    (found,) = decide({**reports, 1: []}, [1], kept)

    assert (found.action, found.steps, found.lost) == ("roll back", (5,), 7)
    assert (found.given, found.identity) == (((1, 2),), "o1")
    assert found.line == (
        "Rank 1 died with a part of GPT, which lay in a peer's memory: all ranks went back 7 "
        "steps, to step 5, and took rank 1's part from rank 2."
    )


def test_a_lost_part_is_refused_where_no_step_is_common_or_one_of_the_peers_died_too() -> None:
    four = (0, 1, 2, 3)
    living = [sharded(12, 10, 5, ranks=four)]
    kept = {1: Kept(3, {"o1": [((15,), 9.0)]})}

    (no_common,) = decide({0: living, 2: living, 3: living, 1: []}, [1], kept)
    (no_peer,) = decide({0: living, 3: living, 1: [], 2: []}, [1, 2], kept)

    assert (no_common.action, no_peer.action) == ("refuse", "refuse")
    assert no_peer.line == (
        "Ranks 1-2 died with a part of GPT, of which there is no second copy: no living peer has "
        "one of a step that all ranks can go back to."
    )


def test_sharded_ranks_go_back_to_their_newest_common_snapshot() -> None:
    (found,) = decide({0: [sharded(412, 412, 400)], 1: [sharded(411, 400)]}, [])

    assert (found.action, found.steps, found.lost) == ("roll back", (400,), 12)
    assert found.line == (
        "The ranks that hold GPT were one step apart: rolled back 12 steps, to step 400 "
        "(snapshot 8 s old)."
    )


def apart(step: int, *snapshots: int, torn: bool = False) -> ModelReport:
    held = tuple(((s,), 8.0) for s in snapshots)
    return ModelReport("apart", "GPT", (0, 1, 2), "o1", (step,), ("o1",), "", torn, snapshots=held)


def test_ranks_that_train_apart_go_back_together_each_to_its_own() -> None:
    reports = {0: [apart(21, 16, torn=True)], 1: [apart(18, 16)], 2: [apart(21, 16, torn=True)]}

    (found,) = decide(reports, [])

    assert (found.action, found.steps, found.lost) == ("roll back", (16,), 5)
    assert "were at different steps: rolled back 5 steps, to step 16" in found.line


def test_ranks_that_train_apart_without_a_common_snapshot_copy_the_most_advanced_one() -> None:
    reports = {0: [apart(3, torn=True)], 1: [apart(3, 1)], 2: [apart(2, 1)]}

    (found,) = decide(reports, [])

    assert (found.action, found.source, found.behind, found.steps) == ("copy", 1, (0, 2), (3,))
    assert "Training is valid, but differs from an undisturbed run." in found.line


def test_a_dead_rank_takes_nothing_from_those_that_train_apart() -> None:
    assert decide({0: [apart(8)], 1: [apart(8)]}, [2]) == []


def test_sharded_ranks_without_a_common_snapshot_are_refused() -> None:
    (found,) = decide({0: [sharded(3, 3)], 1: [sharded(2, 1)]}, [])

    assert (found.action, found.steps) == ("refuse", (3,))
    assert "rank 0 at step 3, rank 1 at step 2" in found.line


def test_sharded_state_that_died_with_its_rank_is_refused() -> None:
    (found,) = decide({0: [sharded(3, 3)], 1: []}, replacements=[1])

    assert (found.action, found.lost) == ("refuse", 3)
    assert found.line.startswith("Rank 1 died with a part of GPT")


def test_survivors_agree_without_the_replacement() -> None:
    reports = {0: [replicated(4)], 1: [replicated(3)], 2: []}

    (found,) = decide(reports, replacements=[2])

    assert (found.source, found.behind) == (0, (1,))


def test_units_are_compared_within_their_ranks_only() -> None:
    reports = {
        0: [replicated(9, ranks=(0, 1))],
        1: [replicated(9, ranks=(0, 1))],
        2: [replicated(4, ranks=(2, 3))],
        3: [replicated(4, ranks=(2, 3))],
    }

    assert decide(reports, []) == []


def test_a_model_that_one_rank_alone_still_holds_is_left_as_it_is_and_this_is_said() -> None:
    best, new = replicated(9, ranks=(0, 1)), replicated(4, ranks=(0, 1), identity="m2")
    reports = {0: [best, new], 1: [replace(new, steps=(3,))]}

    left, copied = decide(reports, [])

    assert (left.action, dict(left.places)) == ("leave", {0: 0})
    assert left.line == (
        "Rank 0 holds GPT, wrapped for ranks 0-1, and rank 1 does not: it was left as it is."
    )
    assert (copied.action, copied.places, copied.source) == ("copy", {0: 1, 1: 0}, 0)
    assert has_unmatched(reports, [])
    # Once: what has been said of it is told with it.
    reports[0][0] = replace(best, is_told=True)
    assert [made.action for made in decide(reports, [])] == ["copy"]


def test_models_that_look_alike_in_another_order_are_not_mistaken_for_each_other() -> None:
    first, second = replicated(3), replicated(4, identity="m2")

    assert decide({0: [first, second], 1: [second, first], 2: [first, second]}, []) == []


def test_a_model_without_a_name_is_paired_with_no_other() -> None:
    unknown = replicated(3, ranks=(0, 1), identity="")
    reports = {0: [unknown], 1: [replace(unknown, steps=(5,))]}

    assert {made.action for made in decide(reports, [])} == {"leave"}


def test_a_replica_whose_optimizer_was_lost_with_its_rank_is_not_said_to_be_alone() -> None:
    zero = replace(sharded(5), model="m1", is_settled=True)
    reports = {0: [zero], 1: [replicated(ranks=(0, 1))]}

    assert decide(reports, []) == []


def test_an_optimizer_that_not_all_ranks_of_its_model_hold_steps_no_more() -> None:
    both, old = replicated(4, ranks=(0, 1)), replicated(4, 7, ranks=(0, 1))

    (found,) = decide({0: [old], 1: [both]}, [])

    assert (found.action, found.parts) == ("forbid", ("m1/0",))
    assert found.line.startswith("Rank 0 holds an optimizer of GPT that not all of ranks 0-1 do")


def test_one_that_has_not_stepped_is_no_matter() -> None:
    both, fresh = replicated(4, ranks=(0, 1)), replicated(4, 0, ranks=(0, 1))

    assert decide({0: [fresh], 1: [both]}, []) == []


def test_a_lost_step_is_found_beside_an_optimizer_that_one_rank_alone_holds() -> None:
    behind, ahead = replicated(3, ranks=(0, 1)), replicated(4, 0, ranks=(0, 1))

    (found,) = decide({0: [behind], 1: [ahead]}, [])

    assert (found.action, found.source, found.behind) == ("copy", 1, (0,))
    assert (found.parts, found.steps) == (("m1/0",), (4,))


def test_an_optimizer_of_shards_that_one_rank_alone_holds_steps_no_more() -> None:
    (found,) = decide({0: [sharded(3)], 1: []}, [])

    assert (found.action, found.parts) == ("forbid", ())
    assert "because its parts may not fit together" in found.line
    assert decide({0: [sharded(0)], 1: []}, []) == []


def test_what_was_made_for_ranks_that_are_no_more_is_left_alone() -> None:
    before_the_scale = replace(sharded(2), ranks=(0, 1, 2))
    assert decide({0: [before_the_scale], 1: [before_the_scale]}, []) == []


def test_reports_travel_as_text() -> None:
    reports = [sharded(3, 3, 1), replicated(1, 2, torn=True)]

    assert from_json(to_json(reports)) == reports


def in_turns(
    report: ModelReport, *turns: int, identity: str = "o1", idle_s: float = 0.0
) -> ModelReport:
    return replace(
        report, identity=identity, parts=(identity,), turns=turns, idle_s=idle_s, name=identity
    )


def test_what_was_trained_in_the_same_turns_goes_back_to_the_same_turn() -> None:
    # Of the first a newer snapshot is common, but of the second there is none of its turn.
    reports = {
        rank: [
            in_turns(sharded(9 - rank, 8, 4, 1), 8, 4, 1),
            in_turns(sharded(18, 16, 8), 7, 4, identity="o2"),
        ]
        for rank in range(2)
    }

    first, second = decide(reports, [])

    assert (first.action, first.steps) == ("roll back", (4,))
    assert (second.action, second.steps) == ("roll back", (8,))
    assert second.line == (
        "O2 was trained in the same steps: rolled back 10 steps, to step 8 (snapshot 8 s old)."
    )


def test_what_rests_or_stands_there_still_does_not_go_back_beside_another() -> None:
    for other in (
        in_turns(sharded(5, 5), 4, identity="o2"),
        in_turns(sharded(9, 5), 4, identity="o2", idle_s=1e9),
    ):
        reports = {r: [in_turns(sharded(9 - r, 4), 4), other] for r in range(2)}
        (found,) = decide(reports, [])
        assert found.steps == (4,)


def test_what_stays_where_another_goes_back_is_told() -> None:
    """Two models of one loop: batches come again for both, and one of them has seen them."""
    other = replace(sharded(6, identity="o2"), name="Critic", idle_s=0.5)
    torn = replace(sharded(6, 1), is_torn=True)

    (found,) = decide({0: [torn, other], 1: [sharded(6, 1), other]}, [])

    assert found.action == "roll back"
    assert found.line.endswith(
        "What was trained since then and stays as it is, Critic at step 6, is trained on those "
        "batches again."
    )


def test_what_was_trained_before_or_stands_there_is_not_told() -> None:
    torn = replace(sharded(6, 1), is_torn=True)
    for other in (
        replace(sharded(6, identity="o2"), idle_s=60.0),
        replace(sharded(1, identity="o2"), idle_s=0.5),
    ):
        (found,) = decide({0: [torn, other], 1: [sharded(6, 1), other]}, [])
        assert "stays as it is" not in found.line
