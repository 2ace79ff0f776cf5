import json
from pathlib import Path

from tests import lint_notebooks


def notebook(folder: Path, *cells: str) -> Path:
    path = folder / "some.ipynb"
    markdown = {"cell_type": "markdown", "metadata": {}, "source": ["# Title"]}
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    path.write_text(json.dumps({"cells": [markdown, *code]}))
    return path


def findings(path: Path) -> list[tuple[int, int, str]]:
    return [(f.cell, f.line, f.code) for f in lint_notebooks.lint(path)]


def test_an_undefined_name_in_a_distributed_cell_is_found_at_its_cell_and_line(
    tmp_path: Path,
) -> None:
    path = notebook(tmp_path, "%load_ext nbdist", "%%distributed -r 0\nx = 1\nprint(x, missing)")

    assert findings(path) == [(2, 3, "F821")]


def test_names_of_the_ranks_are_not_names_of_the_kernel(tmp_path: Path) -> None:
    path = notebook(tmp_path, "%%distributed\nprint(rank, world_size, dist)", "print(rank)")

    assert findings(path) == [(2, 1, "F821")]


def test_names_that_magics_bring_are_known_on_the_side_they_arrive_at(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        "data = [1]\n%dist push data -r 0",
        "%%distributed --run a -p lr=3e-4\nloss = lr * data[0]",
        "%dist pull loss",
        "loss[0]",
    )

    assert findings(path) == []


def test_a_cell_may_await_show_its_last_value_and_call_magics(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        "%%distributed\nimport asyncio\n\nawait asyncio.sleep(0)\n!ls\nx = 1\n%time print(x)\nx",
        "%%bash\nthis is not python (",
    )

    assert findings(path) == []


def test_a_syntax_error_is_a_finding(tmp_path: Path) -> None:
    assert [f[:2] for f in findings(notebook(tmp_path, "%%distributed\nfor x in"))] == [(1, 2)]
