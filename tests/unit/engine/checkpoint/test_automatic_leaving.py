"""All ranks save at the boundary that the notebook names, and stand still until it does."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from nbdist.engine.checkpoint.automatic import Leaving
from nbdist.shared.errors import CheckpointError


def test_nobody_stands_still_unasked() -> None:
    leaving = Leaving()
    leaving.cell_began(saves=True)
    assert not any(leaving.at_boundary() for _ in range(5))
    assert leaving.outcome() == {"is_over": False}


def test_a_rank_that_is_behind_goes_on_to_the_boundary_of_all_and_saves_there() -> None:
    leaving = Leaving()
    leaving.cell_began(saves=True)
    leaving.at_boundary()
    assert leaving.hold() == {"passed": 1, "saves": True}
    with ThreadPoolExecutor(1) as main_thread:
        second = main_thread.submit(leaving.at_boundary)
        leaving.go_on_to(4)  # another rank has passed three
        assert not second.result(5)
    assert [leaving.at_boundary() for _ in range(3)] == [False, True, False]


def test_a_cell_that_does_not_save_is_not_held() -> None:
    leaving = Leaving()
    leaving.cell_began(saves=False)
    assert leaving.hold() == {"passed": 0, "saves": False}
    assert not leaving.at_boundary()


def test_a_failure_is_over_and_told() -> None:
    leaving = Leaving()
    leaving.cell_began(saves=True)
    leaving.saved(None, "The checkpoint of step 3 was not written.")
    assert leaving.outcome()["error"] == "The checkpoint of step 3 was not written."


def test_a_rank_beyond_the_boundary_of_all_fails_instead_of_letting_them_wait() -> None:
    leaving = Leaving()
    leaving.cell_began(saves=True)
    assert leaving.hold() == {"passed": 0, "saves": True}
    leaving.go_on_to(None)  # as when no answer has come in time
    for _ in range(3):
        assert not leaving.at_boundary()
    leaving.go_on_to(2)
    with pytest.raises(CheckpointError, match="has passed the step after which all were to save"):
        leaving.at_boundary()
