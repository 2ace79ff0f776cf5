"""Each rule, by the one interface of all: a planted mistake is said, its sound twin is not."""

import re
from typing import Any

import pytest

from nbdist.client.metrics.checks.page import said_of, section
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.rules import all_rules

RULES = all_rules()


def of_each_rule(test: Any) -> Any:
    return pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])(test)


@of_each_rule
def test_a_planted_mistake_is_one_sentence_or_more_and_its_sound_twin_is_silent(
    rule: Rule[Any],
) -> None:
    said = said_of(rule)
    assert said.endswith(".")
    assert "\n" not in said
    assert said_of(rule, is_sound=True) == ""


@of_each_rule
def test_no_other_rule_takes_the_sound_twin_for_a_mistake(rule: Rule[Any]) -> None:
    from nbdist.client.metrics.checks.cell_checks import CellChecks
    from tests.unit.client.metrics.checks.watching import cell_of

    checks = CellChecks(cell_of((0, 1)))
    checks.receive(list(rule.sound))
    assert checks.lines(is_last=True) == []


@of_each_rule
def test_a_rule_has_a_stable_name_a_remedy_an_example_and_two_reports(rule: Rule[Any]) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.name)
    assert rule.remedy.endswith(".")
    assert rule.example != rule.mended
    assert len(set(rule.sources)) >= 2
    assert all(url.startswith("https://") for url in rule.sources)


@of_each_rule
def test_a_rules_page_has_what_it_says_its_example_its_remedy_and_what_it_reads(
    rule: Rule[Any],
) -> None:
    page = section(rule)
    for part in (rule.name, said_of(rule), rule.example, rule.remedy, *rule.sources):
        assert part in page
    assert all(kind in page for kind in rule.watcher.kinds)
    assert re.search(r"^[+-]", page, re.MULTILINE)  # the lines that mend it


def test_names_of_rules_are_in_order_and_each_is_one_rules() -> None:
    names = [rule.name for rule in RULES]
    assert names == sorted(set(names))
    assert len(names) >= 30
