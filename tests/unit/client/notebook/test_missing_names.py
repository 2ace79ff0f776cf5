"""What a NameError of the ranks advises for a name that the notebook has."""

import collections
import functools
import math
import os.path
import unittest
from collections.abc import Iterator

import pytest

from nbdist.client.notebook.missing_names import advise


def of_main(value: object) -> object:
    """Return a function or a class as if a cell of the notebook had defined it."""
    value.__module__ = "__main__"
    return value


class Net:
    """Of the notebook."""


def scale(x: float) -> float:
    """Of the notebook."""
    return 2 * x


@functools.cache
def slow() -> int:
    """By its name only it can be pickled."""
    return 1


def ones() -> Iterator[int]:
    """Cannot be pickled."""
    yield 1


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hidden", 64, "hidden is a variable of the notebook: %dist push hidden"),
        ("scale", of_main(scale), "scale is a function of the notebook: %dist push scale"),
        ("Net", of_main(Net), "Net is a class of the notebook: %dist push Net"),
        (
            "batches",
            ones(),
            "batches is in the notebook and cannot be sent: make it in a %%distributed cell",
        ),
        (
            "slow",
            of_main(slow),
            "slow is in the notebook and cannot be sent: make it in a %%distributed cell",
        ),
    ],
)
def test_what_the_notebook_made_is_pushed_or_made_on_the_ranks(
    name: str, value: object, expected: str
) -> None:
    assert advise(name, value) == expected


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("m", math, "import math as m"),
        ("math", math, "import math"),
        ("path", os.path, "import posixpath as path"),
        ("abc", collections.abc, "from collections import abc"),
        ("sqrt", math.sqrt, "from math import sqrt"),
        ("Bag", collections.Counter, "from collections import Counter as Bag"),
        ("TestCase", unittest.TestCase, "from unittest import TestCase"),
    ],
)
def test_what_was_imported_is_imported_on_the_ranks_by_a_statement_that_works(
    name: str, value: object, line: str
) -> None:
    assert advise(name, value) == (
        f"{name} is imported in the notebook, not on the ranks: {line} in a %%distributed cell"
    )
    names: dict[str, object] = {}
    exec(line, names)
    assert names[name] is value
