"""Numbers that may move with the steps are read and set where their names lead."""

from collections import defaultdict
from typing import Any

import pytest

from nbdist.engine.steps import keep
from nbdist.engine.steps.followers.find_followers import search
from nbdist.engine.steps.followers.numbers import Numbers


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.setattr(keep.here, "names", lambda: found)
    return found


def watched(names: dict[str, Any]) -> Numbers:
    numbers = Numbers()
    numbers.watch(search({}, names, []), {}, ())
    return numbers


def test_a_number_of_a_dict_is_read_and_set(names: dict[str, Any]) -> None:
    names["counts"] = {"made": 1, "name": "run", 7: 3}
    numbers = watched(names)
    names["counts"]["made"] = 2
    assert numbers.read() == {"counts['made']": 2}
    numbers.put({"counts['made']": 1})
    assert names["counts"] == {"made": 1, "name": "run", 7: 3}


def test_what_is_a_number_no_more_stays(names: dict[str, Any]) -> None:
    names["counts"] = {"made": 1}
    numbers = watched(names)
    names["counts"]["made"] = "two"
    assert numbers.read() == {}
    numbers.put({"counts['made']": 1})
    assert names["counts"] == {"made": "two"}


def test_a_dict_that_makes_its_items_is_not_filled(names: dict[str, Any]) -> None:
    names["history"] = defaultdict(list, loss=[0.5])
    names["counts"] = defaultdict(lambda: {"made": 0}, train={"made": 1})
    numbers = watched(names)
    assert numbers.read() == {"counts['train']['made']": 1, "len(history['loss'])": 1}
    names["history"].clear()
    names["counts"].clear()
    assert numbers.read() == {}
    assert (dict(names["history"]), dict(names["counts"])) == ({}, {})


def test_numbers_of_dicts_that_are_not_read_are_named(names: dict[str, Any]) -> None:
    names["of_class"] = {3: 0.5, 4: 0.1}
    names["counts"] = {"made": 1}
    assert watched(names).beyond == ("numbers in of_class",)
    names["many"] = {f"layer {at}": at for at in range(80)}
    assert watched(names).beyond == ("numbers in many", "numbers in of_class")
    for at in range(40):
        names[f"d{at}"] = {"n": at}
    assert "numbers in d39" in watched(names).beyond  # of dicts, too, the first alone are read


def test_lists_that_are_not_cut_back_are_named(names: dict[str, Any]) -> None:
    for at in range(34):
        names[f"losses{at:02}"] = [0.5]
    numbers = watched(names)
    assert len(numbers.read()) == 32
    assert numbers.beyond == ("what was appended to losses32", "what was appended to losses33")
