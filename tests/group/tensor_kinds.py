"""Models that pack projections, count heads, or hold numbers for heads and experts, for tp."""

# B batch, T sequence, S another sequence, H heads, D model width

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

V, T, D, H = 36, 12, 32, 4


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    mixed = F.scaled_dot_product_attention(q, k, v, mask)
    return mixed.transpose(1, 2).flatten(2)


class Packed(nn.Module):
    """Queries, keys and values one below the other; counts with numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.heads = D, H
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        q, k, v = self.qkv(x_BTD).split(self.width, -1)
        q, k, v = (x.view(b, t, self.heads, -1).transpose(1, 2) for x in (q, k, v))
        return self.out(attended(q, k, v))


class FewKeys(nn.Module):
    """Packs fewer heads for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.few = D // H, D // 2
        self.qkv, self.out = nn.Linear(D, 2 * D, bias=False), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        made = self.qkv(x_BTD)
        sizes = (made.shape[-1] - 2 * self.few, self.few, self.few)
        q, k, v = (x.view(b, t, -1, self.head_dim).transpose(1, 2) for x in made.split(sizes, -1))
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return self.out(attended(q, k, v))


class OneKey(nn.Module):
    """One head for keys and values, for all heads of queries; keys have a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = D // H
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D // H, bias=False)
        self.v, self.out = nn.Linear(D, D // H), nn.Linear(D, D)
        self.norm = nn.LayerNorm(D // H, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        q, k, v = self.q(x_BTD), self.norm(self.k(x_BTD)), self.v(x_BTD)
        q, k, v = (x.view(b, t, -1, self.head_dim).transpose(1, 2) for x in (q, k, v))
        return self.out(attended(q, *(x.expand(-1, q.shape[1], -1, -1) for x in (k, v))))


class Interleaved(nn.Module):
    """Packs head by head, as GPT-NeoX does."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = H
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(b, t, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        return self.out(attended(q, k, v))


class Gated(nn.Module):
    """An mlp whose gate lies above what it lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(D, 4 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Related(nn.Module):
    """Attention with a bias for each head and distance, and one for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = H, D // H
        self.near = nn.Embedding(T, H)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, H)[:, None, None])
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.v, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        # As OPT: where a rank had a part of the features, this would fold tokens into heads.
        q, k, v = (
            p(x_BTD).view(b, -1, self.num_heads, self.head_dim).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        apart = (torch.arange(t)[:, None] - torch.arange(t)).abs()
        bias = self.near(apart).permute(2, 0, 1)
        return self.out(attended(q * self.scale, k, v, bias))


class Scaled(nn.Module):
    """Scales its input by one parameter, which ranks see whole, and its queries by another."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.of_query = nn.Parameter(torch.linspace(0.5, 1.5, D // H))
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.v, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        x = x_BTD * self.of_input
        q, k, v = (p(x).view(b, t, -1, D // H).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(attended(q * self.of_query, k, v))


class Mixing(Scaled):
    """Adds what a rank has whole to its part of the queries: no sum makes its gradient right."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        x = x_BTD * self.of_input
        q, k, v = (p(x).view(b, t, -1, D // H).transpose(1, 2) for p in (self.q, self.k, self.v))
        q = q + x.view(b, t, -1, D // H).mean(2)[:, None] * self.of_query
        return self.out(attended(q, k, v))


class Crossed(nn.Module):
    """Queries of one sequence, for keys and values of another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.v, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        x_BSD = x_BTD.flip(1)[:, : t // 2]
        q, k, v = self.q(x_BTD), self.k(x_BSD), self.v(x_BSD)
        q, k, v = (x.view(b, x.shape[1], -1, D // H).transpose(1, 2) for x in (q, k, v))
        return self.out(attended(q, k, v))


class Chain(nn.Module):
    """Linears outside of a block, of several widths; a product of two, and a mean over others."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.net = nn.Sequential(nn.Linear(D, 24), nn.PReLU(), nn.Linear(24, D), nn.LayerNorm(D))
        self.of_token, self.of_all = nn.Linear(D, 40), nn.Linear(D, 40)
        self.joined, self.narrow, self.head = nn.Linear(40, 16), nn.Linear(16, 8), nn.Linear(8, V)

    def forward(self, x_BT: Tensor) -> Tensor:
        x = self.net(self.token(x_BT))
        mean = self.of_all(x.mean(1, keepdim=True)).transpose(1, 2)
        x = self.joined(F.silu(self.of_token(x)) * mean.transpose(1, 2))
        return self.head(torch.tanh(self.narrow(x)))


_SIZES: dict[str, Any] = {
    "vocab_size": V,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "hidden_size": D,
    "intermediate_size": D,
}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes: dict[str, Any] = {"n_embd": D, "n_layer": 2, "n_head": H, "n_positions": 32, **none}
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, **sizes))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {"num_key_value_heads": 2, "num_local_experts": 4, **_SIZES}
    return MixtralForCausalLM(MixtralConfig(**sizes))


def adapted_experts() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    stacked = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    config = LoraConfig(r=4, target_modules=[], target_parameters=stacked)
    adapted: nn.Module = get_peft_model(mixtral(), config)
    return adapted


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return Phi3ForCausalLM(Phi3Config(**_SIZES, **ends))
