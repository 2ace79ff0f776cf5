"""On one GPU: the rows of attention that one rank of cp works on, by the GPU's own kernels."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_rows_of_a_rank_are_those_of_the_whole(dtype: str, bound: float, key_heads: int) -> None:
    import torch
    from torch.nn import functional as F

    from nbdist.engine.layout.axes.cp.attention import attend_rows

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    query, key, value = (
        torch.randn(2, heads, 256, 64, device="cuda", dtype=kind, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    )
    gqa = key_heads != 4
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)
    expected = torch.autograd.grad(whole.square().sum(), (query, key, value))
    rows = [
        attend_rows(query[:, :, first : first + 64], key, value, None, True, first, enable_gqa=gqa)
        for first in range(0, 256, 64)
    ]
    together = torch.cat(rows, 2)
    found = torch.autograd.grad(together.square().sum(), (query, key, value))
    for a, b in zip((whole.detach(), *expected), (together.detach(), *found), strict=True):
        assert float((a - b).abs().max()) <= bound * float(a.abs().max())
