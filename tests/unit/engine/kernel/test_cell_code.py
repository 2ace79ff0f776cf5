"""A cell is read as IPython runs it."""

import ast

import pytest

from nbdist.engine.kernel.cell_code import compiled, tree, words_of_magics


@pytest.mark.parametrize(
    "source",
    [
        "n = 1",
        "await f()",
        "!ls",
        "_ = %pwd",
        "%time n += 1",
        "%%time\nn += 1",
        "f?",
        "x = !ls {n}",
    ],
)
def test_whatever_ipython_runs_is_python(source: str) -> None:
    assert tree(source) is not None
    assert compiled(source) is not None


@pytest.mark.parametrize("source", ["def f(:", "n = \0", "%%time\nx = (", "'" * 3])
def test_what_is_no_python_costs_no_error(source: str) -> None:
    tree(source)
    compiled(source)


def test_return_at_the_top_has_a_tree_and_no_code() -> None:
    assert tree("return 1") is not None
    assert compiled("return 1") is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("%time n += step(m)", {"n", "step", "m"}),
        ("%%time\nfor i in it:\n    n += i", {"i", "it", "n"}),
        ("files = !ls {folder}", {"folder"}),
        ("n = 1", set()),
    ],
)
def test_each_word_of_a_magic_may_be_a_name(source: str, words: set[str]) -> None:
    cell = tree(source)
    assert isinstance(cell, ast.Module)
    assert words <= set(words_of_magics(cell))
    assert words or not set(words_of_magics(cell))
