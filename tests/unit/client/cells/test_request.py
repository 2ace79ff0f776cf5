"""A cell that cannot compile is told from one that can."""

import warnings

import pytest

from nbdist.client.cells.request import check_syntax
from nbdist.errors import CellSyntaxError


@pytest.mark.parametrize(
    "code",
    [
        "",
        "x = 1",
        "await f()",
        "async for x in y: pass",
        "%timeit x",
        "%%bash\nif [ this is no python ]; then",
        "!ls | grep x",
        "files = !ls",
        "x?",
        "?x",
        "for i in y:\n    %time f(i)",
        "def f():\n\treturn 1",
        "x = 1;",
        "\n\n# a comment",
        "'\\d'",
        "from __future__ import annotations",
    ],
)
def test_what_a_cell_may_hold_passes(code: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_syntax(code)


@pytest.mark.parametrize(
    "code",
    ["if x print", "x = (1", "return 1", "def f(:", "  x\n y", "break", "'open", "f(**)", "x = \0"],
)
def test_what_does_not_compile_is_refused_with_its_line(code: str) -> None:
    with pytest.raises(CellSyntaxError, match="the cell was not run"):
        check_syntax(code)


def test_the_caret_points_at_the_place() -> None:
    with pytest.raises(CellSyntaxError) as caught:
        check_syntax("ok = 1\nif ok:\n    x = = 2")
    what, line, caret = str(caught.value).splitlines()
    assert "line 3" in what
    assert line == "    x = = 2"
    assert caret.index("^") == line.index("= 2")
