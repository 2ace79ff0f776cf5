"""How fast a rank multiplies matrices."""

import torch

from nbdist.engine.training import compute_rate


def test_rates_are_told_by_dtype_and_random_numbers_stay_as_they_are() -> None:
    before = torch.get_rng_state()
    found = compute_rate.measure({"device": torch.device("cpu")})
    assert found.keys() == {"float32", "bfloat16"}
    assert all(rate > 1e8 for rate in found.values())
    assert torch.equal(torch.get_rng_state(), before)
