"""What people say of rules is understood, or refused with what is right."""

from typing import Any

import pytest

from nbdist.client.metrics.checks.rules import all_rules
from nbdist.client.metrics.checks.settings import require_rules, states_of
from nbdist.shared.errors import UsageError


def test_one_state_is_that_of_all_rules() -> None:
    assert states_of("raise") == {rule.name: "raise" for rule in all_rules()}


def test_a_dict_sets_some_rules_and_the_others_warn_or_do_what_all_says() -> None:
    some = states_of({"same-samples": "off"})
    assert some["same-samples"] == "off"
    assert {state for name, state in some.items() if name != "same-samples"} == {"warn"}
    most = states_of({"all": "off", "same-samples": "raise"})
    assert most["same-samples"] == "raise"
    assert {state for name, state in most.items() if name != "same-samples"} == {"off"}


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("rise", "checks is one of off, warn, raise, not 'rise'."),
        (3, "checks is one of off, warn, raise, not 3."),
        ({"same-samples": "on"}, "checks of same-samples is one of off, warn, raise, not 'on'."),
        ({"same-sample": "off"}, "There is no rule 'same-sample'; did you mean same-samples?"),
        ({"x": "off"}, "There is no rule 'x'; %dist checks lists them."),
    ],
)
def test_a_wrong_name_or_state_is_one_clear_error(setting: Any, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        states_of(setting)
    assert str(refused.value) == sentence


def test_a_rule_to_ignore_may_be_a_word_or_some() -> None:
    assert require_rules("same-samples") == ("same-samples",)
    assert require_rules(["same-samples", "unequal-start"]) == ("same-samples", "unequal-start")
