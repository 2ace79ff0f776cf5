"""From the sketches of two tensors their distance can be told, and whether they are equal."""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from nbdist.engine.checks.numerics import next_recorded  # noqa: E402
from nbdist.engine.checks.sketch import BUCKETS, sketch  # noqa: E402

# The spread of a count sketch of 16 sums is about a fifth: four of them.
NEAR = pytest.approx(1, abs=0.8)


@pytest.mark.parametrize("size", [1, 5, 1000, 40_000, 1 << 17, 3 << 20])
@pytest.mark.parametrize("kind", ["noise", "offset", "one number"])
def test_the_distance_of_two_sketches_is_that_of_the_tensors(size: int, kind: str) -> None:
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(0))
    moved = numbers.clone()
    if kind == "noise":
        moved += 0.01 * torch.randn(size, generator=torch.Generator().manual_seed(1))
    elif kind == "offset":
        moved += 0.01
    else:
        moved[size // 2] += 0.5
    told = (sketch(moved) - sketch(numbers))[:BUCKETS].norm()
    assert told / (moved - numbers).double().norm() == NEAR


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64", "bool", "complex64"])
def test_every_dtype_has_one_and_its_last_bit_shows(dtype: str) -> None:
    numbers = (torch.arange(40) % 2).to(getattr(torch, dtype))
    other = numbers.clone()
    other[7] = 0
    assert sketch(numbers).shape == (BUCKETS + 1,)
    assert torch.equal(sketch(numbers), sketch(numbers.clone()))
    assert sketch(numbers)[-1] != sketch(other)[-1]


def test_what_is_empty_or_not_contiguous_has_one() -> None:
    whole = torch.randn(6, 4)
    assert torch.equal(sketch(whole.t()), sketch(whole.t().contiguous()))
    assert not sketch(torch.empty(0)).any()


def test_the_first_steps_are_recorded_and_then_fewer_and_fewer() -> None:
    steps = [1]
    while steps[-1] < 10_000:
        steps.append(next_recorded(steps[-1]))
    assert steps[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18]
    assert len(steps) < 60
    assert all(later <= 1.25 * step + 1 for step, later in pairwise(steps))
