"""A fingerprint shows every change of a number, wherever in the tensor it is."""

import pytest

torch = pytest.importorskip("torch")

from nbdist.engine.checks.fingerprints import as_float, fingerprints  # noqa: E402


def told(tensor: object) -> float:
    return as_float(int(fingerprints([tensor])))  # type: ignore[list-item]


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32"])
@pytest.mark.parametrize("factor", [2, -1])
def test_any_number_that_is_doubled_or_negated_shows(size: int, dtype: str, factor: int) -> None:
    numbers = torch.arange(1, size + 1).to(getattr(torch, dtype))
    changed = [numbers.clone() for _ in range(size)]
    for place, one in enumerate(changed):
        one[place] *= factor
    assert told(numbers) not in map(told, changed)


def test_equal_numbers_are_equal_wherever_in_memory_a_rank_has_them() -> None:
    numbers = torch.randn(9)
    assert told(numbers[1:]) == told(numbers[1:].clone())
