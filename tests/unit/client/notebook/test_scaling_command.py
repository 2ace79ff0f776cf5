"""What `%dist scaling` measures and predicts, by the words of its line."""

import pytest

from nbdist.client.export.worlds import last_line
from nbdist.client.notebook.arguments import parse_dist
from nbdist.client.notebook.scaling_command import outcomes, parse_place, ranks_until
from nbdist.shared.errors import UsageError
from nbdist.study.links import LINKS
from nbdist.study.machine import Machine


def test_ranks_double_up_to_those_of_the_cluster() -> None:
    assert ranks_until(1) == (1,)
    assert ranks_until(6) == (1, 2, 4, 6)
    assert ranks_until(8) == (1, 2, 4, 8)


def test_a_word_is_a_link_and_a_text_a_machine() -> None:
    assert parse_place("IB400") is LINKS["ib400"]
    machine = parse_place("8 h100 nvlink4, 2 hosts ib400")
    assert isinstance(machine, Machine)
    assert machine.world_size == 16


def test_an_unknown_link_names_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="no link is called 'ib401'") as raised:
        parse_place("ib401")
    assert "ib400" in str(raised.value)
    assert "8 h100" in str(raised.value)


@pytest.mark.parametrize("words", ["net", "3", "-n 1,2", "--weak"])
def test_what_would_run_is_refused_beside_what_if(words: str) -> None:
    asked = parse_dist(f"scaling {words} --what-if")
    assert asked is not None
    with pytest.raises(UsageError, match="runs nothing"):
        outcomes(asked, None, [])


def test_of_a_size_that_failed_the_line_that_names_the_error_is_told() -> None:
    said = 'Traceback (most recent call last):\n  File "a.py", line 1\n    spread()\n'
    error = "nbdist.LayoutError: dp=2 takes 2 ranks, and there is 1."
    assert last_line(f"{said}{error}\nWhy: dp=2\nDo:  start 2") == error
    assert last_line("it made no 12 steps in 600 s") == "it made no 12 steps in 600 s"
