"""The floors of a proof hold for what differs most by luck: parameters of a single number."""

import pytest

from tests.group.harness import run_ranks

SEEDS = range(40, 70)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_summed_in_two_halves_lie_within_what_is_allowed(dtype: str) -> None:
    ((share, where),) = run_ranks(1, _furthest, dtype)
    assert share < 0.9, where


def _furthest(dtype: str) -> tuple[float, str]:
    import torch

    from tests.group.noise_ranks import furthest

    return furthest(SEEDS, getattr(torch, dtype))
