"""A cell that cannot compile is told from one that can."""

import warnings
from pathlib import Path

import pytest

from nbdist.client.cells.request import CellRequest, check_syntax, read_script
from nbdist.shared.errors import CellSyntaxError, UsageError


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


def test_a_notebook_is_no_script_and_is_exported_first() -> None:
    with pytest.raises(UsageError) as refused:
        read_script(Path("/work/my train.ipynb"))
    assert refused.value.what == "my train.ipynb is a notebook, not a script."
    assert refused.value.do == (
        "nbdist export 'my train.ipynb' 'my train.py' in a terminal, then %dist run 'my train.py'"
    )


@pytest.mark.parametrize("above", [b"", b"\n\n\n"])
def test_a_script_that_is_not_utf_8_says_so_and_what_to_do(tmp_path: Path, above: bytes) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(above + "name = 'Größe'\n".encode("latin-1"))
    with pytest.raises(UsageError) as refused:
        read_script(file)
    assert refused.value.what == f"The script {file} is not UTF-8."
    assert "# -*- coding: latin-1 -*-" in refused.value.do
    file.write_bytes(b"# -*- coding: latin-1 -*-\n" + file.read_bytes())
    assert "Größe" in read_script(file)


@pytest.mark.parametrize("encoding", ["ascii", "nonsense"])
def test_a_script_that_names_a_wrong_encoding_is_told_of_it(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"# coding: {encoding}\nname = 'Größe'\n", encoding="utf-8")
    with pytest.raises(UsageError, match="not in the encoding that it names") as refused:
        read_script(file)
    assert refused.value.do.startswith("save it as UTF-8")


def test_a_script_is_named_by_a_path_with_which_it_is_found_again() -> None:
    below, elsewhere = str(Path.cwd() / "jobs/train.py"), "/work/my jobs/train.py"
    assert CellRequest("", (0,), script=below).ran.run == "%dist run jobs/train.py"
    assert CellRequest("", (0,), script=elsewhere).ran.run == "%dist run '/work/my jobs/train.py'"
    assert CellRequest("", (0,), script=elsewhere).ran.name == "train.py"
    assert CellRequest("", (0,)).ran.name == "the cell"


def test_a_script_is_named_by_its_whole_path_where_the_notebooks_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert CellRequest("", (0,)).ran.name == "the cell"
    assert CellRequest("", (0,), script="/work/train.py").ran.run == "%dist run /work/train.py"
