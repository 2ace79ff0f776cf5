"""A cell's code in a script: verbatim, and what only a notebook has commented out."""

import contextlib
from textwrap import dedent
from typing import Any

import pytest

from nbdist.client.export.plain_code import awaited, indented, plain


def code_of(source: str) -> str:
    return plain(dedent(source).strip("\n")).code


def test_python_stays_as_it_stands() -> None:
    source = "# why\nx = 1;  y = 2  # two\n\ndef f():\n    '''a\n  b'''\n    return x"
    assert plain(source).code == source


@pytest.mark.parametrize(
    ("line", "stands_as"),
    [
        ("!nvidia-smi", "# !nvidia-smi"),
        ("%matplotlib inline", "# %matplotlib inline"),
        ("net?", "# net?"),
        ("net??", "# net??"),
        ("files = !ls -l", "# files = !ls -l"),
        ("%time best = train(20)", "best = train(20)"),
        ("a = %time f(1)", "a = f(1)"),
        ("%timeit -n 3 f()", "# %timeit -n 3 f()"),
        ("answer = input()", "# answer = input()"),
        ("nbdist.publish(model, 'm', example=x)", "# nbdist.publish(model, 'm', example=x)"),
        ("if rank == 0: breakpoint()", "# if rank == 0: breakpoint()"),
    ],
)
def test_a_line_of_the_notebook_is_a_comment_and_timing_goes(line: str, stands_as: str) -> None:
    assert code_of(f"a = 1\n{line}\nb = 2") == f"a = 1\n{stands_as}\nb = 2"


def test_a_line_inside_of_a_block_leaves_the_block_whole() -> None:
    assert code_of("if x:\n    !ls\nelse:\n    y = 1") == (
        "if x:\n    pass  # !ls\nelse:\n    y = 1"
    )


def test_a_function_that_asks_or_draws_stays() -> None:
    source = "def ask():\n    return input()\n\ndef draw():\n    plt.plot(x)\n    plt.show()"
    assert plain(source) == plain(source).__class__(source)


def test_what_was_commented_out_is_told() -> None:
    found = plain("%%time\n%%capture\n%config x\ny = 1\nbreakpoint()")
    assert found.code == "# %config x\ny = 1\n# breakpoint()"
    assert found.without == ("%%time", "%%capture", "%config x", "breakpoint()")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("%%bash\nls", "is a cell of %%bash"),
        ("%%time f()\nx", "is a cell of %%time"),
        ("x = (", "is no Python that a script can hold: '(' was never closed, line 1"),
        ("await f(", "is no Python that a script can hold: '(' was never closed, line 1"),
        ("a = '\0'", "is no Python that a script can hold: source code string cannot contain"),
    ],
)
def test_a_cell_that_no_script_can_hold_says_why(source: str, reason: str) -> None:
    assert plain(source).reason.startswith(reason)


def test_features_go_to_the_top_of_the_script() -> None:
    found = plain("from __future__ import annotations, division\nx: A = 1")
    assert found.features == ("annotations", "division")
    assert found.code == "# from __future__ import annotations, division\nx: A = 1"


def test_texts_over_several_lines_are_not_indented() -> None:
    code = "x = '''a\nb'''\ny = f'''{x}\nc'''\nif x:\n    z = 1"
    space: dict[str, object] = {}
    exec(f"for _ in range(1):\n{indented(code)}", space)
    assert (space["x"], space["y"], space["z"]) == ("a\nb", "a\nb\nc", 1)


def test_what_awaits_outside_of_a_function_gives_a_script_the_same_names() -> None:
    found = plain("""
async def double(x):
    return 2 * x
import math as m
model = await double(2)  # stays
async with lock:
    texts = [(last := await double(i), f'''{i}
a''') for i in range(2)]
def uses():
    return model
""")
    assert found.awaits
    code = awaited(found.code)
    assert "    model = await double(2)  # stays\n" in code
    space: dict[str, Any] = {"lock": contextlib.AsyncExitStack()}
    exec(code, space)
    assert (space["model"], space["last"], space["uses"](), space["m"].pi > 3) == (4, 2, 4, True)
    assert space["texts"] == [(0, "0\na"), (2, "1\na")]
    assert not plain("async def f():\n    await g()").awaits
