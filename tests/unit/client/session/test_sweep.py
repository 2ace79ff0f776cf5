"""Which runs a sweep makes, and how it tells them apart."""

import pytest

from nbdist.client.session.sweep import MOST_RUNS, announcement, combinations, said_of
from nbdist.client.tracking.names import run_name_of
from nbdist.shared.errors import UsageError


def test_several_lists_are_tried_in_all_combinations_the_last_changing_fastest() -> None:
    assert combinations({"lr": [0.1, 0.2], "width": [8, 16]}) == (
        {"lr": 0.1, "width": 8},
        {"lr": 0.1, "width": 16},
        {"lr": 0.2, "width": 8},
        {"lr": 0.2, "width": 16},
    )


def test_too_many_runs_are_refused_with_their_number_and_the_way_to_one_value() -> None:
    with pytest.raises(UsageError) as refused:
        combinations({"lr": [0.1] * 8, "width": list(range(9))})
    assert str(refused.value) == (
        f"8 lr x 9 width would be 72 runs; a sweep makes {MOST_RUNS} at most. "
        "A tuple is one value: -p sizes=(1,2)."
    )
    assert len(combinations({"lr": list(range(MOST_RUNS))})) == MOST_RUNS


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(UsageError, match=r"-p lr=\[\] has no value"):
        combinations({"lr": []})


def test_a_sweep_says_what_it_will_do() -> None:
    assert announcement({"lr": [1, 2]}, 2) == "2 runs of this cell, one for each lr."
    assert announcement({"lr": [1, 2], "w": [1, 2, 3]}, 6) == (
        "6 runs of this cell, one for each combination of 2 lr x 3 w."
    )


def test_a_run_is_told_and_called_by_what_it_tries() -> None:
    assert said_of({"lr": 0.001, "act": "gelu"}) == "lr=0.001 act='gelu'"
    assert run_name_of({"lr": 0.001, "act": "gelu"}) == "lr0.001-actgelu"
