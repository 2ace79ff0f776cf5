"""Operations of what runs, as torch counts them on a GPU."""

# B samples, H heads, T tokens, D width of a head

import torch
from torch.nn.functional import scaled_dot_product_attention

from nbdist.engine.dry.flops import Flops

B, H, T, D = 2, 3, 16, 8


def test_attention_of_cpus_counts_two_products_forward_and_five_backward() -> None:
    q, k, v = (torch.randn(B, H, T, D, requires_grad=True) for _ in range(3))
    product = 2 * B * H * T * T * D
    with Flops() as counted:
        outputs = scaled_dot_product_attention(q, k, v, is_causal=True)
        assert counted.total == 2 * product
        outputs.sum().backward()
    assert counted.total == 7 * product
