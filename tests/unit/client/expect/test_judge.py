"""What holds, what does not, and the one error that says so."""

from dataclasses import replace
from math import inf, nan

import pytest

from nbdist.client.expect import judge
from nbdist.client.expect.assertion import Comparison, parse
from nbdist.client.metrics.analysis.values import Straggler
from nbdist.client.metrics.usual_step import RunFigures, StepTime
from nbdist.shared.errors import ExpectationError, NBDistError

RUN = RunFigures(2, 40, ({"all_reduce": 1},) * 2, (41, 41), 644.0, StepTime(5.0, 0.02, 0.0, 30))


def numbers(text: str, **values: list[float]) -> str:
    asked = parse(text)
    assert isinstance(asked, Comparison)
    told = {name: values[name.split()[1]] for name in asked.names}
    return judge.judge_comparison(asked, told, "said")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("loss < 0.3", True),
        ("loss < 0.2", False),
        ("0 < loss < 0.3", True),
        ("0.25 < loss < 0.3", False),
        ("loss == 0.5 * 0.4", True),
        ("-loss >= 0", False),
        ("loss / 0 > 1", False),
        ("loss < 0.3 and not loss > 0.2", True),
        ("loss > 0.3 or loss == 0.1", False),
    ],
)
def test_a_comparison_is_pythons(text: str, *, holds: bool) -> None:
    if holds:
        assert numbers(text, loss=[0.2]) == f"{text} holds: said."
    else:
        with pytest.raises(ExpectationError, match="does not hold: said"):
            numbers(text, loss=[0.2])


@pytest.mark.parametrize(
    "text",
    ["loss < 1", "loss > 1", "loss == loss", "loss != 1", "not loss > 1", "(loss < 1) == (2 < 1)"],
)
def test_nothing_holds_of_nan(text: str) -> None:
    with pytest.raises(ExpectationError, match="NaN"):
        numbers(text, loss=[nan])


def test_what_each_rank_has_must_hold_on_all_and_those_where_not_are_named() -> None:
    assert "holds" in numbers("seen == 1", seen=[1, 1, 1])
    with pytest.raises(ExpectationError, match="on ranks 1-2"):
        numbers("seen == 1", seen=[1, 2, 2])


def test_a_difference_of_infinities_is_no_number_either() -> None:
    with pytest.raises(ExpectationError, match="does not hold"):
        numbers("loss - best != 1", loss=[inf], best=[inf])


def test_an_expectation_that_fails_is_an_assertion_and_an_error_of_ours() -> None:
    assert issubclass(ExpectationError, AssertionError)
    assert issubclass(ExpectationError, NBDistError)


def test_another_kind_or_count_of_collectives_is_told_by_kind() -> None:
    assert "1 all_reduce a step" in judge.judge_collectives("same", RUN, RUN, "the baseline")
    more = replace(RUN, kinds=({"all_reduce": 1, "broadcast": 1},) * 2)
    with pytest.raises(ExpectationError) as failed:
        judge.judge_collectives("same", more, RUN, "the baseline")
    assert "a step makes 1 all_reduce, 1 broadcast" in str(failed.value)
    assert "in the baseline it made 1 all_reduce." in str(failed.value)


def test_a_collective_of_one_rank_alone_is_noticed() -> None:
    more = replace(RUN, kinds=({"all_reduce": 1}, {"all_reduce": 1, "send": 1}))
    with pytest.raises(ExpectationError, match="1 send"):
        judge.judge_collectives("same", more, RUN, "the baseline")


def test_collectives_of_some_steps_alone_are_noticed_where_runs_are_as_long() -> None:
    now_and_then = replace(RUN, in_all=(45, 45))
    with pytest.raises(ExpectationError, match="made 45 collectives in all"):
        judge.judge_collectives("same", now_and_then, RUN, "the baseline")
    longer = replace(now_and_then, steps=44)
    assert "holds" in judge.judge_collectives("same", longer, RUN, "the baseline")


def test_bytes_may_differ_by_the_share_and_no_more() -> None:
    assert "holds" in judge.judge_bytes("bytes 1 %", 1005, 1000, 0.01, "the baseline")
    with pytest.raises(ExpectationError, match=r"\+2 %"):
        judge.judge_bytes("bytes 1 %", 1020, 1000, 0.01, "the baseline")
    with pytest.raises(ExpectationError, match=r"-50 %"):
        judge.judge_bytes("bytes 1 %", 500, 1000, 0.01, "the baseline")
    with pytest.raises(ExpectationError, match="from nothing"):
        judge.judge_bytes("bytes 1 %", 500, 0, 0.01, "the baseline")


def test_a_step_may_be_longer_by_the_noise_of_both_runs() -> None:
    base = StepTime(5.0, 0.02, 0.0, 30)
    within = StepTime(5.6, 0.03, 0.0, 30)
    assert "holds" in judge.judge_step("step", within, base, 1.1, "the baseline")
    with pytest.raises(ExpectationError, match=r"1\.20 times as long"):
        judge.judge_step("step", StepTime(6.0, 0.03, 0.0, 30), base, 1.1, "the baseline")


def test_ranks_without_a_core_are_allowed_more_but_never_a_multiple() -> None:
    base = StepTime(5.0, 0.02, 0.0, 30)
    assert "holds" in judge.judge_step("s", StepTime(7.0, 0.03, 0.3, 30), base, 1.1, "it")
    with pytest.raises(ExpectationError):
        judge.judge_step("s", StepTime(20.0, 0.03, 0.95, 30), base, 1.1, "it")


def test_alarms_are_all_told_and_a_rank_without_a_core_is_none() -> None:
    slow = Straggler(1, "forward", 0.4, "Rank 1 is slow.", 3)
    starved = Straggler(0, "backward", 0.4, "Rank 0 waits for a core.", 3, "starved")
    assert "Rank 0 waits for a core" in judge.judge_alarms("no alarms", [], [starved])
    with pytest.raises(ExpectationError) as failed:
        judge.judge_alarms("no alarms", ["Replicas differ."], [slow, starved])
    assert "2 alarms" in str(failed.value)
    assert "Replicas differ. Rank 1 is slow." in str(failed.value)


def test_a_layout_that_differs_is_told_by_the_proofs_first_line() -> None:
    proof = "zero3 against one process: DIFFERS: the gradient\n  tensor  what"
    with pytest.raises(ExpectationError, match="DIFFERS: the gradient"):
        judge.judge_parity("parity", ok=False, proof=proof)
    assert judge.judge_parity("parity", ok=True, proof="equal").endswith("holds: equal.")


def test_a_training_that_was_cut_off_is_an_alarm() -> None:
    with pytest.raises(ExpectationError, match="The run failed after 3 steps"):
        judge.judge_alarms("no alarms", [], [], "failed after 3 steps")
