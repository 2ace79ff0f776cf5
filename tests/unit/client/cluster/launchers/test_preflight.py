"""What hosts must have in common before they train together."""

from typing import Any

import pytest

from nbdist.client.cluster.launchers.hosts import preflight
from nbdist.shared.errors import StartError


def _facts(python: str = "3.11.7", torch: str = "2.13.0+cpu", **more: Any) -> dict[str, Any]:
    versions = {"torch": torch, "nbdist": "0.1.0"}
    return {"python": python, "versions": versions, "messages": 9, "trouble": "", **more}


def test_patches_of_python_and_builds_of_torch_may_differ() -> None:
    preflight.require_same_versions({"localhost": _facts(), "b": _facts("3.11.9", "2.13.0+cu130")})


def test_what_differs_stands_in_a_table() -> None:
    with pytest.raises(StartError) as refused:
        preflight.require_same_versions(
            {"localhost": _facts(), "b": _facts("3.12.1"), "c": _facts(torch="2.11.0")}
        )
    assert refused.value.what == "b and c and the notebook differ in Python and torch."
    assert "b          3.12    2.13.0" in refused.value.why
    assert "c          3.11    2.11.0" in refused.value.why


def test_an_address_that_two_machines_have_leads_to_none_of_them() -> None:
    facts = {
        "localhost": _facts(machine="a", addresses=["10.0.0.1", "172.17.0.1"]),
        "b": _facts(machine="b", addresses=["172.17.0.1", "10.0.0.2"]),
    }
    assert preflight.candidates(facts, None) == {"localhost": ["10.0.0.1"], "b": ["10.0.0.2"]}


def test_a_node_that_is_the_notebooks_machine_keeps_its_addresses() -> None:
    one = _facts(machine="a", addresses=["10.0.0.1"])
    found = preflight.candidates({"localhost": one, "node1": one}, None)
    assert found == {"localhost": ["10.0.0.1"], "node1": ["10.0.0.1"]}


def test_each_host_gets_the_first_address_that_all_others_reach() -> None:
    tried = {"a": ["10.0.0.1", "10.1.0.1"], "b": ["10.0.0.2"], "c": ["10.1.0.3"]}
    reached = {
        "a": {"b": ["10.0.0.2"], "c": ["10.1.0.3"]},
        "b": {"a": ["10.0.0.1", "10.1.0.1"], "c": ["10.1.0.3"]},
        "c": {"a": ["10.1.0.1"], "b": ["10.0.0.2"]},
    }
    assert preflight.choose_addresses(tried, reached)["a"] == "10.1.0.1"


def test_who_cannot_reach_whom_is_named() -> None:
    tried = {"a": ["10.0.0.1"], "b": ["10.0.0.2"]}
    reached: dict[str, dict[str, list[str]]] = {"a": {"b": []}, "b": {"a": ["10.0.0.1"]}}
    with pytest.raises(StartError) as refused:
        preflight.choose_addresses(tried, reached)
    assert "a cannot reach b (10.0.0.2)" in refused.value.why


def test_a_clock_an_hour_off_is_told_and_a_second_is_not() -> None:
    facts = {"b": {"time": 4600.0}, "c": {"time": 999.0}}
    notes = preflight.clock_notes(facts, {"b": 1000.0, "c": 1000.0})
    assert len(notes) == 1
    assert notes[0].startswith("The clock of b is 3,600 s ahead of the notebook's")
