"""What `%dist push` has sent, as code: literals, and functions with all that they read."""

import linecache
import math
import sys
import types
from textwrap import dedent
from typing import Any

import pytest

from nbdist.client.export.sent import Sent, literal, sent, written_down


def defined(source: str, name: str = "cell") -> dict[str, Any]:
    """Return the namespace that a cell of a notebook leaves, whose source Python can find."""
    text, file = dedent(source).strip("\n") + "\n", f"<a test's {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    notebook = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(text, file, "exec"), vars(notebook))
    return vars(notebook)


@pytest.fixture(autouse=True)
def _main_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def run(one: Sent) -> dict[str, Any]:
    """Return what the code of it gives, in a script of its own."""
    return defined("\n".join(code for _, code in one.code), "script")


@pytest.mark.parametrize(
    "value", [3, "a", None, (1,), [1, [2]], {"a": {"b": (1.5, True)}}, math.inf]
)
def test_a_plain_value_is_a_literal(value: object) -> None:
    assert run(sent("value", value))["value"] == value


def test_a_number_that_is_none_has_a_notation() -> None:
    assert literal({"a": [float("nan")]}) == "{'a': [float('nan')]}"


def test_a_function_comes_with_what_it_reads_and_as_it_was_then() -> None:
    space = defined(
        """
        import math as m
        from collections import OrderedDict
        stoi = {c: i for i, c in enumerate("abc")}
        def scaled(x):
            return m.floor(x * 2)
        def encode(text, *, kind=OrderedDict):
            return kind((c, scaled(stoi[c])) for c in text)
        """
    )
    one = sent("encode", space["encode"])
    space["stoi"].clear()
    assert not one.trouble
    assert run(one)["encode"]("cb") == {"c": 4, "b": 2}


def test_functions_that_call_each_other_and_a_class_with_its_base_come_whole() -> None:
    space = defined(
        """
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        class Base:
            def value(self): return even(4)
        class Net(Base):
            size = 3
            def forward(self): return self.value(), self.size
        """
    )
    assert run(sent("Net", space["Net"]))["Net"]().forward() == (True, 3)


def test_what_was_computed_when_a_definition_ran_is_as_it_was_then() -> None:
    space = defined(
        """
        lr, width = 0.1, 8
        def f(x=lr, *, k=lr * 2, act=str):
            return x, k
        class Net:
            size = width
            last = 3
            double = size * 2
            def forward(self, y=lr):
                return self.size, y, self.double
        """
    )
    assert "__defaults__" not in str(sent("f", space["f"]).code)
    space.update(lr=0.5, width=1)
    assert run(sent("f", space["f"]))["f"]() == (0.1, 0.2)
    assert run(sent("Net", space["Net"]))["Net"]().forward() == (8, 0.1, 16)


def test_what_a_class_or_function_was_given_later_is_given_in_the_script() -> None:
    space = defined(
        """
        class Net:
            scale = 1.0
            def forward(self): return self.scale
        def better(self): return self.scale + self.depth
        def tag(x, seen=[]):
            seen.append(x)
            return tag.times * len(seen)
        Net.scale, Net.depth, Net.forward = 3.0, 5, better
        tag.times = 4
        """
    )
    space["tag"](0)
    assert run(sent("Net", space["Net"]))["Net"]().forward() == 8.0
    assert run(sent("tag", space["tag"]))["tag"](1) == space["tag"](1) == 8
    space["tag"].held = object()
    assert sent("tag", space["tag"]).trouble == "tag.held was set later, and is no plain value"


def test_a_configuration_is_its_class_and_a_call_of_it() -> None:
    space = defined(
        """
        from dataclasses import dataclass
        from enum import Enum
        from typing import Optional
        class Mode(Enum):
            FAST = 1
        @dataclass
        class Config:
            lr: float = 0.1
            name: Optional[str] = None
        cfg = Config(lr=0.5)
        cfg.name = "a"
        def mode(): return Mode.FAST, cfg
        """
    )
    found = run(sent("mode", space["mode"]))["mode"]()
    assert (found[0].name, found[1].lr, found[1].name) == ("FAST", 0.5, "a")
    space["cfg"].other = 1
    assert (
        sent("cfg", space["cfg"]).trouble == "cfg is a Config, which holds more than plain values"
    )


def test_a_function_under_another_name_and_one_of_a_library_keep_both_names() -> None:
    space = defined("from math import floor\ndef f(x): return floor(x)\ng = f")
    assert run(sent("g", space["g"]))["g"](1.5) == 1
    assert run(sent("down", math.floor))["down"](1.5) == 1


def test_a_lambda_is_the_statement_that_it_stands_in() -> None:
    assert run(sent("twice", defined("twice = lambda x: 2 * x")["twice"]))["twice"](4) == 8


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("value = object()", "value is a object, which is no plain value"),
        ("class A: pass\nvalue = A()", "value is a A, which is no plain value"),
        ("big = object()\ndef value(): return big", "big is a object, which is no plain value"),
        ("value = type('value', (), {'x': 3})", "value is a class whose source no cell has"),
        (
            "def make():\n    def f(): pass\n    return f\nvalue = make()",
            "value is made inside of a function, or by IPython's own syntax",
        ),
    ],
)
def test_what_has_no_code_says_what_it_is(source: str, told: str) -> None:
    assert sent("value", defined(source)["value"]) == Sent("value", (), told)


def test_without_a_kernel_a_push_is_what_cells_above_write_down() -> None:
    cells = ["import math\nk = 2\nx = 1", "def f(a):\n    return math.floor(a * k)", "x = 3"]
    assert run(written_down("f", cells))["f"](1.6) == 3
    assert run(written_down("x", cells))["x"] == 3


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("y", "no cell writes y down; the kernel knows its value"),
        ("z", "z is computed in the notebook; the kernel knows its value"),
        ("f", "z is computed in the notebook"),
    ],
)
def test_what_cells_do_not_write_down_is_said(name: str, told: str) -> None:
    cells = ["z = compute()", "def f(): return z", "broken ("]
    assert told in written_down(name, cells).trouble
