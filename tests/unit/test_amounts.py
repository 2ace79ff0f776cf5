"""Numbers as people read them."""

import pytest

from nbdist.amounts import counted, name_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (4, "4 B"),
        (999, "999 B"),
        (4000, "4.0 kB"),
        (32_000, "32 kB"),
        (815_872, "816 kB"),
        (999_499, "999 kB"),
        (999_999, "1.0 MB"),
        (8_400_000, "8.4 MB"),
        (9_970_000, "10 MB"),
        (7e12, "7.0 TB"),
        (7e15, "7,000 TB"),
    ],
)
def test_bytes_are_named_by_powers_of_ten(size: float, text: str) -> None:
    assert name_bytes(size) == text


def test_things_are_counted_in_the_singular_and_the_plural() -> None:
    assert [counted(n, "step") for n in (0, 1, 1240)] == ["0 steps", "1 step", "1,240 steps"]
