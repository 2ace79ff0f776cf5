"""A function or class that is sent, and what the notebook's cells say of it by then."""

import linecache
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.client.export.as_sent import known_of
from nbdist.client.export.notebook_cells import History
from nbdist.client.export.resolve import resolve
from nbdist.client.notebook.arguments import parse_dist, parse_distributed


class Kernel:
    """Runs cells as IPython does: in `__main__`, each with its source in Python's line cache."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.history = History()
        self._count = 0

    def run(self, source: str, *sends: str) -> None:
        self._count += 1
        name = f"<cell {id(self)} {self._count}>"
        linecache.cache[name] = len(source), None, source.splitlines(True), name
        try:
            exec(compile(source, name, "exec"), self.names)
        except NameError:
            has_failed = True
        else:
            has_failed = False
        if sends:
            source = f"%dist push {' '.join(sends)}"
            self.history.note_push({one: self.names[one] for one in sends})
        self.history.note_run(self._count, source, f"id {self._count}", has_failed=has_failed)

    def said(self) -> SimpleNamespace:
        blocks = resolve(self.history.cells(), None, parse_dist, parse_distributed).blocks
        pushed = [block for block in blocks if block.pushes]
        return SimpleNamespace(
            code=[block.code for block in pushed if block.code],
            reasons=[block.reason for block in pushed if block.reason],
        )


ANEW = "it was defined anew by a cell that failed, or where no cell shows it"


def test_what_a_failed_cell_defined_anew_is_no_older_definition() -> None:
    kernel = Kernel()
    kernel.run('def h(): return "old"\nSCALE = 1\ndef f(): return SCALE')
    kernel.run('def h(): return "new"\nSCALE = 5\nundefined_name')
    kernel.run("", "f", "h")
    assert kernel.said().code == []
    assert kernel.said().reasons == [
        f"pushes f: cell 1 no longer says what SCALE was: {ANEW}",
        f"pushes h: cell 1 no longer says what was sent: {ANEW}",
    ]


LAMBDA = "exec('act, LIM = ACTS[0], 30')"


@pytest.mark.parametrize(
    ("cell", "anew", "other"),
    [
        ("LIM = 3\ndef f(): return LIM", "exec('LIM = 30')", "LIM"),
        ("LIM = 3\ndef g(): return LIM\ndef f(): return g()", "exec('LIM = 30')", "LIM"),
        ("LIM = 3\ndef f():\n    def g(): return LIM\n    return g", "exec('LIM = 30')", "LIM"),
        ("A, LIM = 1, 3\ndef f(): return LIM", "exec('LIM = 3.0')", "LIM"),
        ("LIM = 3\nclass f:\n    def g(self): return LIM", "exec('LIM = 4')", "LIM"),
        ("class A:\n    x = 1\ndef f(): return A", "setattr(A, 'x', 2)", "A"),
        ("LIM = 3\nACTS = {\n    0: lambda: 1,\n}\ndef f(x): return x.act, LIM", LAMBDA, "LIM"),
    ],
)
def test_what_a_function_reads_and_no_cell_shows_keeps_it_out(
    cell: str, anew: str, other: str
) -> None:
    kernel = Kernel()
    kernel.run(cell)
    kernel.run(anew)
    kernel.run("", "f")
    assert kernel.said().reasons == [f"pushes f: cell 1 no longer says what {other} was: {ANEW}"]


def test_a_default_is_the_value_that_its_name_had() -> None:
    kernel = Kernel()
    kernel.run("LIM = 3")
    kernel.run("exec('LIM = 30')")
    kernel.run("def f(x=LIM): return x")
    kernel.run("exec('LIM = 3')")
    kernel.run("", "f")
    assert kernel.said().reasons == [f"pushes f: cell 1 no longer says what LIM was: {ANEW}"]


AS_SENT = """
LIM = other = 1e999
def f(x=LIM): return x, LIM
---
def deco(f):
    def inner(): return f()
    return inner
@deco
def f(): return 1
---
from functools import wraps
def deco(f):
    @wraps(f)
    def inner(): return f()
    return inner
@deco
def f(): return 1
---
from math import pi
import math
CFG = {'a': [1, (2, None)], 'b': -0.5}
def f(): return CFG, pi, math.tau, CFG.a
---
class A:
    '''It.'''
    x: int = 1
    def f(self): return A.x
class f(A):
    y = 2
---
from dataclasses import dataclass
@dataclass
class f:
    x: int = 1
    def g(self): return self.x
---
import enum
class f(enum.IntEnum):
    A = 1
---
def f(n): return f(n - 1) if n else 0
---
class f:
    @property
    def a(self): return 1
    @classmethod
    def b(cls): return cls
---
async def f(): return 1
"""


@pytest.mark.parametrize("cell", AS_SENT.split("---"))
def test_what_the_cells_say_as_it_was_sent_is_in_the_script(cell: str) -> None:
    kernel = Kernel()
    kernel.run(cell)
    kernel.run("", "f")
    assert kernel.said().reasons == []
    assert cell.strip().rpartition("\n")[2] in kernel.said().code[0]


def test_a_class_that_no_cell_shows_is_no_older_one() -> None:
    kernel = Kernel()
    kernel.run("class f:\n    def a(self): return 1")
    kernel.run("class f:\n    def a(self): return 2\nundefined_name")
    kernel.run("", "f")
    assert kernel.said().reasons == [f"pushes f: cell 1 no longer says what was sent: {ANEW}"]


@pytest.mark.parametrize(
    "anew", ["exec('def f(): return 2')", "def g(): return 2", "exec('f.__code__ = g.__code__')"]
)
def test_a_function_that_no_cell_calls_by_this_name_is_no_older_one(anew: str) -> None:
    kernel = Kernel()
    kernel.run("def f(): return 1\ndef g(): return 3")
    kernel.run(anew)
    if anew.startswith("def"):
        kernel.names["f"] = kernel.names["g"]  # as session.push({"f": g}) sends it
    kernel.run("", "f")
    assert kernel.said().reasons == [f"pushes f: cell 1 no longer says what was sent: {ANEW}"]


def test_a_source_that_cannot_be_had_is_not_known() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def f(): return 1", "<somewhere>", "exec"), names)
    assert known_of("f", names["f"]) == {}
    assert known_of("print", print) == {}
    assert known_of("x", object()) == {}
