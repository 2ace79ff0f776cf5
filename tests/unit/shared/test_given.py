"""What a call was given is what it takes, or is not."""

import pytest

from nbdist.shared.options import is_number, is_whole


@pytest.mark.parametrize("value", ["2", 2.5, 2.0, True, None, [2], 0])
def test_what_is_no_whole_number_of_one_or_more(value: object) -> None:
    assert not is_whole(value, 1)
    assert is_whole(1, 1)


@pytest.mark.parametrize("value", ["2", True, None, [2], 1j, float("nan")])
def test_what_is_no_number(value: object) -> None:
    assert not is_number(value)
    assert is_number(2.5)
    assert is_number(-2)
