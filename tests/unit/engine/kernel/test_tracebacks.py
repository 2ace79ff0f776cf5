"""Where an error was raised, in the user's own lines."""

from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch

from nbdist.client.faults.failures import Failure, place_of
from nbdist.engine.kernel import location
from nbdist.engine.kernel.ipython import tracebacks
from nbdist.engine.layout.plan.mesh import parse

CELL = "/tmp/ipykernel_nbdist/cd34.py"


def raised_in(code: str, file: str, **names: Any) -> TracebackType | None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        exec(compile(code, file, "exec"), names)
    return caught.tb.tb_next  # without this function


def heard(heading: str) -> str:
    """Return what the notebook makes of it."""
    return place_of(Failure(0, "LayoutError", "", (heading, "LayoutError: tp=3 needs 3 ranks")))


def test_an_error_within_nbdist_is_at_the_line_of_the_cell_that_called_it() -> None:
    location.here.name_cell(CELL, 7)
    trace = raised_in("x = 1\n\nparse('tp=3', 2)", CELL, parse=parse)

    assert heard(tracebacks.place_of(trace)) == "cell 7, line 3"


def test_an_error_in_a_module_of_the_users_is_at_its_line(tmp_path: Path) -> None:
    trace = raised_in("\nparse('tp=3', 2)", str(tmp_path / "train.py"), parse=parse)

    assert heard(tracebacks.place_of(trace)) == "train.py, line 2"


def test_lines_of_libraries_are_nobodys_place() -> None:
    trace = raised_in("f()", torch.__file__, f=lambda: 1 / 0)
    assert trace is not None

    # The frames of torch and of this test: the latter is the user's.
    assert tracebacks.place_of(trace).startswith(f"File {__file__}:")
    assert tracebacks.place_of(None) == ""
