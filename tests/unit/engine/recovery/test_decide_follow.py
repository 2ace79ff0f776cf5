"""What follows the steps is copied, put back, or said to be lacking: from reports alone."""

import json
from dataclasses import asdict, replace

from nbdist.engine.recovery.decide_follow import FollowReport, decide
from nbdist.engine.steps.followers.progress import Progress

KINDS = {"sched": "StepLR", "ema": "Average", "n": ""}


def report(**told: object) -> FollowReport:
    did = ("ema", "n", "sched")
    progress = Progress(kinds=KINDS, did=did, began={"n": 4}, before={"n": 3}, now={"n": 4})
    fields = {key: told.pop(key) for key in list(told) if key in Progress.__dataclass_fields__}
    progress = replace(progress, **fields)  # type: ignore[arg-type]
    made = FollowReport(ranks=(0, 1), step=9, names=("GPT",), progress=progress)
    return replace(made, **told)  # type: ignore[arg-type]


WHOLE = report()
HALF = report(has_stepped=True, lacking=("sched",), began={"n": 3}, before={"n": 2}, now={"n": 3})


def test_ranks_that_came_equally_far_have_nothing_to_do() -> None:
    (one,) = decide({0: WHOLE, 1: WHOLE})
    assert (one.behind, one.lines) == ((), ())


def test_a_rank_that_had_not_come_so_far_copies_from_one_that_had() -> None:
    (one,) = decide({0: HALF, 1: WHOLE})

    assert (one.source, one.behind, one.names) == (1, (0,), ("ema", "sched"))
    assert one.numbers == {"n": 4}
    assert not any(one.lacking.values())
    (line,) = one.lines
    assert line == (
        "Rank 0 took sched (StepLR) from rank 1, where step 9 was followed by all that belongs "
        "to it."
    )


def test_numbers_that_differed_before_the_step_are_no_counters_and_stay() -> None:
    (one,) = decide({0: replace(HALF, progress=replace(HALF.progress, began={"n": 8})), 1: WHOLE})
    assert one.numbers == {}


def test_a_step_that_no_rank_has_done_to_its_end_is_half_done() -> None:
    (one,) = decide({0: HALF, 1: HALF})

    assert one.behind == ()
    (line,) = one.lines
    assert line == (
        "Step 9 of GPT is half done on ranks 0-1: sched (StepLR) has not followed it. Do what the "
        "loop does with it after a step in a cell of its own, or nbdist.restore() a checkpoint; "
        "then %dist retry."
    )


def test_an_optimizer_that_has_not_stepped_can_be_made_up_for_by_a_checkpoint_alone() -> None:
    progress = replace(HALF.progress, lacking=("opt2", "sched"), optimizers=("opt2",))
    half = replace(HALF, progress=progress)

    (one,) = decide({0: half, 1: half})

    (line,) = one.lines
    assert line == (
        "Step 9 of GPT is half done on ranks 0-1: opt2 and sched (StepLR) have not followed it. "
        "The gradients of opt2 went with the fault. Where their backward comes after the step that "
        "was made, do the rest of the loop's body, that backward included, in a cell of its own; "
        "else nbdist.restore() a checkpoint. Then %dist retry."
    )


def test_a_half_step_is_named_for_the_new_rank_that_is_cloned_with_it_too() -> None:
    (one,) = decide({0: HALF, 1: FollowReport()})

    assert "half done on ranks 0-1" in one.lines[0]
    assert "%%distributed -r" not in one.lines[0]


def test_a_cell_that_makes_all_anew_has_no_half_step() -> None:
    (one,) = decide({r: replace(HALF, continues=False) for r in range(2)})
    assert one.lines == ()


def test_parts_that_no_other_rank_has_are_lacking_where_they_did_not_move() -> None:
    half = replace(HALF, cut=("ema",), progress=replace(HALF.progress, lacking=("ema", "sched")))

    (one,) = decide({0: half, 1: replace(WHOLE, cut=("ema",))})

    assert one.names == ("sched",)
    assert one.lacking == {0: ("ema",), 1: ()}
    assert "half done on rank 0: ema (Average)" in one.lines[-1]
    assert "%%distributed -r 0" in one.lines[-1]


def test_a_rank_that_copied_a_step_takes_all_that_followed_it() -> None:
    lost = replace(HALF, has_copied=True, progress=replace(HALF.progress, has_stepped=False))
    lost = replace(lost, progress=replace(lost.progress, lacking=()))

    (one,) = decide({0: lost, 1: WHOLE})

    assert (one.source, one.behind, one.numbers) == (1, (0,), {"n": 4})
    assert "Rank 0 took ema (Average), sched (StepLR) and n from rank 1" in one.lines[0]


def test_ranks_that_went_back_take_what_follows_from_one_that_knows_all_of_the_step() -> None:
    (one,) = decide({0: report(is_back=True, is_whole=False), 1: report(is_back=True)})
    assert (one.source, one.behind, one.names) == (1, (0,), ("sched", "ema"))


def test_stages_copy_nothing_of_each_other() -> None:
    (one,) = decide({0: replace(HALF, is_alike=False), 1: replace(WHOLE, is_alike=False)})
    assert one.names == ()
    assert one.lacking[0] == ("sched",)


def test_sets_of_ranks_that_train_apart_from_each_other_are_decided_by_themselves() -> None:
    pairs = {
        r: replace(HALF if r < 2 else WHOLE, ranks=(r // 2 * 2, r // 2 * 2 + 1)) for r in range(4)
    }
    assert [one.source for one in decide({**pairs, 4: FollowReport()})] == [0, 2]


def test_what_has_moved_without_a_step_is_put_back_or_named() -> None:
    ahead = report(ahead=("ema", "n"), now={"n": 5})

    (one,) = decide({0: ahead, 1: ahead})

    assert one.put_back == {0: {"n": 4}, 1: {"n": 4}}
    counted, left = one.lines
    assert counted == "Counted back with the batch that is lost: n = 4."
    assert left == (
        "ema (Average) had moved since step 9 and cannot be put back: with the batch that comes "
        "again it moves twice."
    )


def test_reports_travel_as_json() -> None:
    assert FollowReport.from_plain(json.loads(json.dumps(asdict(HALF)))) == HALF


FIRST = replace(
    HALF, step=1, progress=replace(HALF.progress, lacking=(), unknown=("ema", "n"), kinds=KINDS)
)


def test_what_nobody_knows_of_a_first_step_is_named_and_holds_the_cell() -> None:
    (one,) = decide({0: FIRST, 1: FIRST})

    assert one.is_unknown
    (line,) = one.lines
    assert line == (
        "Whether ema (Average) and n had followed step 1 of GPT is not known, for no step before "
        "it shows that. What the loop does with them after the optimizer's step, do in a cell of "
        "its own; then %dist retry."
    )
    anew = replace(FIRST, continues=False)
    assert decide({0: anew, 1: anew})[0].lines == ()


def test_what_one_rank_has_moved_in_the_first_step_the_others_take() -> None:
    moved = replace(FIRST, progress=replace(FIRST.progress, unknown=(), now={"n": 4}))

    (one,) = decide({0: FIRST, 1: moved})

    assert (one.source, one.behind, one.names) == (1, (0,), ("ema", "sched"))
    assert (one.numbers, one.is_unknown) == ({"n": 4}, False)


def test_numbers_go_back_with_their_batch_where_no_rank_has_stepped() -> None:
    idle = FollowReport(progress=Progress(ahead=("n",), began={"n": 0}))

    (one,) = decide({0: idle, 1: FollowReport()})

    assert one.put_back == {0: {"n": 0}}
    assert one.lines == ("Counted back with the batch that is lost: n = 0.",)


def test_counters_that_moved_apart_in_one_turn_are_named_and_hold_a_retry_back() -> None:
    first, second = report(has_stepped=True, now={"n": 6}), report(has_stepped=True, now={"n": 5})
    (one,) = decide({0: first, 1: second})
    assert one.is_unknown
    (line,) = one.lines
    assert line.startswith(
        "Equal when the step began, and not now: n is 6 on rank 0 and 5 on rank 1."
    )


def test_numbers_that_were_each_ranks_own_before_the_turn_are_not_named() -> None:
    first = report(has_stepped=True, began={"n": 4}, now={"n": 6})
    second = report(has_stepped=True, began={"n": 1}, now={"n": 2})
    (one,) = decide({0: first, 1: second})
    assert (one.is_unknown, one.lines) == (False, ())


def test_a_step_that_was_left_is_named_with_what_nobody_can_find() -> None:
    rest = "random numbers drawn there, a function's own variables and dicts and lists made there"
    for left in (report(has_copied=True), report(has_stepped=True, is_open=True)):
        (one,) = decide({0: WHOLE, 1: left})
        assert one.lines[-1] == (
            "On rank 1 the code between the optimizer's step 9 and the next batch did not run to "
            f"its end: {rest} are as the fault has left them."
        )
        assert not one.is_unknown


def test_of_a_step_that_was_left_options_beyond_those_looked_at_are_named() -> None:
    left = report(has_stepped=True, is_open=True, beyond=("opt.param_groups[16:]",))
    (one,) = decide({0: left, 1: left})
    assert "there and opt.param_groups[16:] are as" in one.lines[-1]


def test_of_a_step_that_was_left_nothing_is_said_where_the_cell_starts_over() -> None:
    left = report(has_stepped=True, is_open=True, continues=False)
    (one,) = decide({0: left, 1: left})
    assert one.lines == ()


def test_options_that_are_tuples_travel_as_such() -> None:
    name = "opt.param_groups[0]['betas']"
    sent = report(began={name: (0.9, 0.999)}, now={name: (0.8, 0.999)})
    assert FollowReport.from_plain(json.loads(json.dumps(asdict(sent)))) == sent
