"""Whether a call was given what it takes; whoever uses the value says so where it was not."""

from numbers import Integral, Real
from typing import TypeGuard


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether that is a whole number, `least` or more; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether that is a number; True and False are none, and neither is NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) == float(value)
