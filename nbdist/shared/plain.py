"""Plain values: what may travel between a rank and the notebook without pickle.

None, bool, numbers, text, and lists, tuples and dicts of these. JSON has no tuples, no NaN and
only text for keys, so those three travel tagged and arrive as they were.
"""

import math
from typing import Any

BUDGET = 65536  # about the most bytes of JSON a value may take
_DEEPEST = 100  # levels; a list that holds itself has no end

_SCALARS = (type(None), bool, int, float, str)
_TUPLE, _FLOAT, _DICT = "tuple", "float", "dict"


def is_plain(value: object, budget: int = BUDGET) -> bool:
    """Return whether `value` may travel as it is.

    Args:
        value: What a cell's last line gave. Subclasses (numpy scalars, named tuples) are not
            plain: they would arrive as something else.
        budget: Roughly the most bytes it may take.
    """
    return _size(value, budget, _DEEPEST) <= budget


def _size(value: Any, budget: int, levels: int) -> int:
    kind = type(value)
    if kind is str:
        return len(value) + 2
    if kind in _SCALARS:
        return 8
    if kind in (list, tuple):
        items = iter(value)
    elif kind is dict:
        items = (part for pair in value.items() for part in pair)
    else:
        return budget + 1
    if not levels:
        return budget + 1
    total = 2
    for item in items:
        total += 2 + _size(item, budget, levels - 1)
        if total > budget:
            break
    return total


def encode(value: Any) -> Any:
    """Return the JSON form of a plain value."""
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if kind is list:
        return [encode(item) for item in value]
    if kind is tuple:
        return {_TUPLE: [encode(item) for item in value]}
    if kind is dict:
        return {_DICT: [[encode(key), encode(item)] for key, item in value.items()]}
    return value


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        ((tag, content),) = value.items()
        if tag == _FLOAT:
            return float(content)
        if tag == _TUPLE:
            return tuple(decode(item) for item in content)
        return {decode(key): decode(item) for key, item in content}
    return value
