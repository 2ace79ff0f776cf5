"""What a cell's rules do with what they find, by their states."""

from typing import Any

import pytest

from nbdist.client.metrics.checks.cell_checks import CellChecks
from nbdist.client.metrics.checks.rule import Memory, Rule
from nbdist.client.metrics.checks.rules import all_rules
from nbdist.client.metrics.checks.settings import states_of
from nbdist.client.metrics.checks.table import Checks, ChecksCost
from tests.unit.client.metrics.checks.watching import cell_of


def rule(name: str) -> Rule[Any]:
    return next(one for one in all_rules() if one.name == name)


def heard(of: Rule[Any], setting: Any = "warn", **more: Any) -> CellChecks:
    checks = CellChecks(cell_of((0, 1)), states_of(setting), **more)
    checks.receive(list(of.planted))
    return checks


def test_a_rule_that_warns_ends_no_cell() -> None:
    checks = heard(rule("same-samples"))
    assert list(checks.by_rule) == ["same-samples"]
    assert checks.mistake is None


def test_a_rule_that_is_off_says_nothing_and_reads_nothing() -> None:
    assert heard(rule("same-samples"), {"same-samples": "off"}).found == ()
    assert heard(rule("same-samples"), "off")._watchers == []


def test_the_first_finding_of_a_rule_that_raises_is_the_mistake_that_ends_a_cell() -> None:
    checks = heard(rule("same-samples"), {"same-samples": "raise"})
    assert checks.mistake is not None
    assert checks.mistake.rule == "same-samples"
    assert checks.mistake.sentence == checks.found[0]
    checks.receive(list(rule("unequal-start").planted))
    assert checks.mistake.rule == "same-samples"


def test_an_ignored_rule_says_nothing_and_what_it_has_seen_is_not_said_of_the_next_cell() -> None:
    from nbdist.client.metrics.checks.planting import rows
    from nbdist.shared.wire import CELL_END

    session = Memory()
    apart = rows("alike", {"m:w": 1.0}, {"m:w": 2.0}, (CELL_END,))
    cell = cell_of((0, 1))
    ignoring = CellChecks(cell, states_of("raise"), ["replicas-differ"], of_session=session)
    ignoring.receive(apart)
    assert (ignoring.found, ignoring.mistake) == ((), None)
    after = CellChecks(cell, states_of("raise"), of_session=session)
    after.receive(apart)
    assert after.found == ()


def test_the_table_has_each_rule_its_state_and_what_the_newest_cell_did() -> None:
    states = states_of({"same-samples": "raise", "unequal-start": "off"})
    cost = ChecksCost(100, 3.0, 12.0)
    text = str(Checks(states, {"same-samples": "..."}, {"model-per-rank"}, (), cost))
    lines = {line.split()[0]: line.split() for line in text.splitlines()}
    assert set(lines) > {one.name for one in all_rules()}
    assert lines["same-samples"][1:3] == ["raise", "found"]
    assert lines["unequal-start"][1] == "off"
    assert lines["model-per-rank"][1:3] == ["warn", "ignored"]
    assert text.endswith(
        "Together they cost each rank 12.0 µs a step, and the notebook 3.00 µs a step for all "
        "ranks, in the newest training, of 100 steps."
    )
    assert "once a cell has trained" in str(Checks("warn"))


def test_a_rule_with_an_error_of_its_own_is_named_as_failed_and_the_others_watch_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Any, record: Any) -> None:
        raise KeyError("moved")

    monkeypatch.setattr(rule("loss-not-finite").watcher, "take", fail)
    checks = heard(rule("loss-not-finite"))
    checks.receive(list(rule("same-samples").planted))
    assert checks.failed == {"loss-not-finite"}
    assert list(checks.by_rule) == ["same-samples"]
    assert "failed" in str(Checks("warn", failed=checks.failed))
