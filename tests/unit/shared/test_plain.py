"""Plain values arrive as they were."""

import json
import math
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.shared.plain import BUDGET, decode, encode, is_plain

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = scalars | st.tuples(scalars, scalars)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_a_plain_value_arrives_equal_and_of_the_same_types(value: Any) -> None:
    arrived = decode(json.loads(json.dumps(encode(value))))
    assert arrived == value
    assert repr(arrived) == repr(value)


def test_not_a_number_and_infinities_arrive() -> None:
    nan, up, down = decode(json.loads(json.dumps(encode([math.nan, math.inf, -math.inf]))))
    assert math.isnan(nan)
    assert (up, down) == (math.inf, -math.inf)


def test_a_dict_that_looks_like_a_tag_is_still_a_dict() -> None:
    dicts: list[object] = [{"tuple": [1]}, {"float": "nan"}, {"dict": []}, {1: {"tuple": ()}}]
    for value in dicts:
        assert decode(json.loads(json.dumps(encode(value)))) == value


class Pair(NamedTuple):
    left: int
    right: int


class Text(str):
    pass


@pytest.mark.parametrize("value", [{1}, b"x", 1j, object(), Pair(1, 2), Text("x"), [[{"a": {1}}]]])
def test_what_would_arrive_as_something_else_is_not_plain(value: object) -> None:
    assert not is_plain(value)


def test_large_values_are_not_plain() -> None:
    assert is_plain("x" * (BUDGET - 10))
    assert not is_plain("x" * (BUDGET + 1))
    assert not is_plain(list(range(BUDGET)))
    assert not is_plain(dict.fromkeys(range(BUDGET)))


def test_a_list_that_holds_itself_and_a_very_deep_one_are_not_plain() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    assert not is_plain(cyclic)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert not is_plain(deep)
