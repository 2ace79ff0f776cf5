"""What `--resume` goes on with: decided in the kernel, whatever has been sent to MLflow by then."""

from pathlib import Path
from typing import Any

import pytest

from nbdist.client.tracking.past.runs import WHAT_ATTEMPTS_ARE, require_run, runs, runs_table
from nbdist.client.tracking.run import Tracker
from nbdist.client.tracking.shipping.sender import _newest_of_name
from nbdist.client.tracking.spool import SpooledRun, spool_of, spooled_runs
from nbdist.client.tracking.writing import Outcome
from nbdist.shared.errors import UsageError
from nbdist.shared.wire import CONTINUES, TRAINED_BEFORE
from tests.tracking.conftest import Ranks, cell, client_of

EXPERIMENT = "02_train"
REFUSED = "tried is a sweep, and --resume continues one run: give --run one of its runs, lr1, lr2."


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """A tracker whose runs stay in the spool: the process that sends them never comes."""
    tracker = Tracker(tmp_path / ".nbdist", experiment=EXPERIMENT)
    monkeypatch.setattr(tracker.shipping, "ensure", lambda: None)
    return tracker


def train(tracker: Tracker, name: str, study: str | None = None, **changes: Any) -> None:
    ranks = Ranks(2)
    run = tracker.follow(cell(run_name=name, study=study, **changes), ranks.telemetry)
    ranks.step(2)
    assert run.finish("finished") is not None


def sweep(tracker: Tracker, name: str) -> None:
    study = tracker.begin_study(name, "train()", {"lr": [1, 2]})
    for lr in (1, 2):
        train(tracker, f"lr{lr}", study.key)
    study.finish("finished")


def test_a_sweep_is_refused_before_any_of_it_was_sent(tracker: Tracker) -> None:
    sweep(tracker, "tried")
    with pytest.raises(UsageError) as refused:
        require_run(tracker.folder, EXPERIMENT, "tried")
    assert str(refused.value) == REFUSED
    assert not any(run.state().sent for run in spooled_runs(tracker.folder))


def test_a_sweep_is_refused_while_it_goes_on(tracker: Tracker) -> None:
    study = tracker.begin_study("tried", "train()", {"lr": [1, 2]})
    train(tracker, "lr1", study.key)
    with pytest.raises(UsageError, match="one of its runs, lr1"):
        require_run(tracker.folder, EXPERIMENT, "tried")
    study.finish("finished")


def test_an_older_run_of_a_sweeps_name_is_not_what_is_meant(tracker: Tracker) -> None:
    train(tracker, "tried")
    require_run(tracker.folder, EXPERIMENT, "tried")
    sweep(tracker, "tried")
    with pytest.raises(UsageError) as refused:
        require_run(tracker.folder, EXPERIMENT, "tried")
    assert str(refused.value) == REFUSED


def test_a_run_that_is_newer_than_a_sweep_of_its_name_is_gone_on_with(tracker: Tracker) -> None:
    sweep(tracker, "tried")
    train(tracker, "tried")
    require_run(tracker.folder, EXPERIMENT, "tried")


def test_a_run_of_a_sweep_is_gone_on_with_by_its_own_name(tracker: Tracker) -> None:
    sweep(tracker, "tried")
    require_run(tracker.folder, EXPERIMENT, "lr2")
    require_run(tracker.folder, EXPERIMENT, "nobody here knows it")


def test_a_run_keeps_its_params_where_it_is_resumed_without_them(tracker: Tracker) -> None:
    train(tracker, "long", params={"lr": 0.1, "width": 8})
    train(tracker, "long", resume=True, params={"lr": 0.01})
    train(tracker, "long", resume=True)
    (row,) = runs(tracker.folder, EXPERIMENT)
    assert row.params == {"lr": "0.01", "width": "8"}
    assert row.facts["width"] == "8"  # which comparisons look at
    assert row.steps == 6


def attempt(
    tracker: Tracker, steps: int, outcome: Outcome, before: str | None = None, **facts: str
) -> str:
    """Train as one attempt at a cell, after that of the key `before`; return its key."""
    ranks = Ranks(2, facts)
    info = cell(run_name="again", continues=before)
    run = tracker.follow(info, ranks.telemetry)
    ranks.step(steps)
    link = run.finish(outcome)
    assert link is not None
    return link.folder.name


def test_an_attempt_that_starts_over_counts_alone_and_says_that_one_failed(
    tracker: Tracker,
) -> None:
    failed = attempt(tracker, 7, "failed")
    newest = attempt(tracker, 16, "finished", failed)
    (row,) = runs(tracker.folder, EXPERIMENT)
    assert (row.steps, row.state, row.attempt, row.key) == (16, "finished", 2, newest)
    curves = SpooledRun(spool_of(tracker.folder) / newest).curves()
    assert [point[0] for point in curves["loss"]] == list(range(1, 17))
    table = runs_table(tracker.folder, EXPERIMENT)
    assert table.rows == (row,)
    assert "attempt" in str(table).splitlines()[0]
    assert WHAT_ATTEMPTS_ARE in str(table)


def test_an_attempt_that_goes_on_counts_with_the_one_before(tracker: Tracker) -> None:
    failed = attempt(tracker, 7, "failed")
    continues = attempt(tracker, 9, "failed", failed, **{CONTINUES: "yes"})
    (row,) = runs(tracker.folder, EXPERIMENT)
    assert (row.steps, row.attempt) == (16, 2)
    assert CONTINUES not in row.facts

    attempt(tracker, 5, "finished", continues)  # and a third one that starts over after all
    (row,) = runs(tracker.folder, EXPERIMENT)
    assert (row.steps, row.attempt) == (5, 3)


def test_steps_that_are_made_again_from_a_checkpoint_count_once(tracker: Tracker) -> None:
    def begin_at(trained: int) -> dict[str, str]:
        return {CONTINUES: "yes", TRAINED_BEFORE: str(trained)}

    failed = attempt(tracker, 17, "failed", **{TRAINED_BEFORE: "100"})
    again = attempt(tracker, 8, "failed", failed, **begin_at(110))
    newest = attempt(tracker, 15, "finished", again, **begin_at(115))
    (row,) = runs(tracker.folder, EXPERIMENT)
    assert (row.steps, row.attempt) == (30, 3)
    curves = SpooledRun(spool_of(tracker.folder) / newest).curves()
    assert [point[0] for point in curves["loss"]] == list(range(1, 31))
    assert TRAINED_BEFORE not in row.facts

    attempt(tracker, 9, "finished", newest, **begin_at(200))  # steps of another optimizer
    assert runs(tracker.folder, EXPERIMENT)[0].steps == 39


def test_an_attempt_at_a_resumed_run_goes_on_with_it(tracker: Tracker) -> None:
    train(tracker, "again")
    failed = attempt(tracker, 7, "failed")
    train(tracker, "again", continues=failed, resume=True)
    assert [row.steps for row in runs(tracker.folder, EXPERIMENT)] == [9, 2]


@pytest.mark.parametrize("name", ["plain", "it's", 'a "b"', 'it\'s "b" \\', "%"])
def test_a_run_on_the_server_is_found_by_its_name_whatever_signs_that_has(
    name: str, home: Path
) -> None:
    client = client_of(home)
    experiment = client.create_experiment("signs")
    for other in ("other", name, "another"):
        client.create_run(experiment, run_name=other)
    found = _newest_of_name(client, experiment, name)
    assert found is not None
    assert found.info.run_name == name
