"""Variables that a notebook's own cells set in the environment, and no script does."""

import pytest

from nbdist.client.export.environment_lost import variables_in
from nbdist.client.export.ipython_lines import plain
from tests.unit.client.export.exported import resolved, script

READS = "%%distributed\nimport os\nplace = os.environ['DATA']"


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("import os\nos.environ['DATA'] = 'x'\nprint(os.environ['HOME'])", ("DATA",)),
        ("os.environ.update({'A': '1'}, B='2')", ("A", "B")),
        ("os.environ.setdefault('A', '1'); os.putenv('B', '2')", ("A", "B")),
        ("from os import environ\nenviron |= dict(A='1')", ("A",)),
        ("os.environ.update(read_settings())", ("read_settings()",)),
        ("%env A=1\n%env B 2 3\n%set_env C=$D", ("A", "B", "C")),
        ("%env\n%env A", ()),
        ("settings.update({'A': 1})\nos.environ.get('A')", ()),
    ],
)
def test_variables_that_a_cell_sets_are_found(cell: str, found: tuple[str, ...]) -> None:
    assert variables_in(plain(cell).code) == found


def test_variables_that_the_script_reads_and_does_not_set_are_told() -> None:
    (told,) = script("%env DATA=/data\n%env SEED=1", "%dist start", READS).doubts
    assert told == (
        "Cell 1 sets DATA, SEED in the notebook's environment, which its ranks take over; the"
        " script does not: set them before torchrun."
    )
    written = "%%writefile paths.py\nimport os\nplace = os.getenv('DATA')"
    (told,) = script("%env DATA=/data", written, "%%distributed\nimport paths").doubts
    assert told.endswith("set it before torchrun.")


@pytest.mark.parametrize(
    "cells",
    [
        ("%env DATA=1", "%%distributed\na = 1"),
        ("%dist start", "%env DATA=1", READS),
        ("%dist start", "%env DATA=1", "%dist restart", READS),
        ("%env DATA=1", f"{READS}\nos.environ['DATA'] = '2'"),
        ("%env MASTER_PORT=29501", READS),
    ],
)
def test_variables_that_the_script_does_not_miss_are_not_told(cells: tuple[str, ...]) -> None:
    assert script(*cells).doubts == ()


def test_an_own_cell_that_is_exported_sets_its_variables_in_the_script() -> None:
    cell = "import os\nos.environ['DATA'] = '1'"
    assert resolved(cell, READS, chosen=(1, 2)).variables == []
    assert resolved(cell, READS, chosen=(2,)).variables == [(1, ("DATA",))]
