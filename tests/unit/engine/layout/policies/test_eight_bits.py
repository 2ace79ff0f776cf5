"""Layers whose products are of eight bits: which they are, and that they do what torchao's do."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.engine.compat.libraries import torchao_products
from nbdist.engine.layout.plan.mesh import parse
from nbdist.engine.layout.policies import eight_bits
from nbdist.engine.layout.policies.efficiency import Precision
from nbdist.shared.errors import LayoutError

FP8, MXFP8 = Precision("fp8"), Precision("mxfp8")


class Block(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2)
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)


class Net(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(32, 64)


def test_plain_linears_inside_blocks_compute_so_and_no_head_or_attentions_own() -> None:
    assert eight_bits.layers_of(Net(), FP8) == [
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.up",
        "blocks.1.down",
    ]


def test_sizes_are_multiples_of_16_and_of_32_for_blocks_of_scales() -> None:
    assert eight_bits.layers_of(Net(40), FP8) == []
    assert eight_bits.layers_of(Net(48), MXFP8) == []
    assert len(eight_bits.layers_of(Net(64), MXFP8)) == 4


def test_without_blocks_the_last_layer_is_the_head() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    assert eight_bits.layers_of(model, FP8) == ["0"]


def test_other_precisions_have_none() -> None:
    assert eight_bits.layers_of(Net(), Precision("bf16")) == []
    assert eight_bits.layers_of(Net(), Precision("fp32", "bf16")) == []


def own_layer(kind: str, layer: nn.Linear) -> nn.Module:
    """Return torchao's own layer, with the weights of another one."""
    if kind == "fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        made: nn.Module = convert_to_float8_training(
            nn.Sequential(layer), config=Float8LinearConfig(emulate=True)
        )
        return made
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    own: nn.Module = MXFP8Linear(
        layer.in_features,
        layer.out_features,
        kernel_preference=KernelPreference.EMULATED,
        wgrad_with_hp=True,
    )
    own.load_state_dict(layer.state_dict())
    return own.to(torch.bfloat16)


def outcome(layer: nn.Module, x: torch.Tensor, back: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(back)
    return [out, x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
def test_a_layer_computes_what_torchaos_own_does_to_the_bit(kind: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(32, 64).to(torch.bfloat16)
    x, back = torch.randn(2, 5, 32).bfloat16(), torch.randn(2, 5, 64).bfloat16()
    own = own_layer(kind, copy.deepcopy(plain))
    rounded = outcome(plain, x, back)
    plain.zero_grad()
    eight_bits.EightBits(plain, kind, emulates=True)

    ours, theirs = outcome(plain, x, back), outcome(own, x, back)

    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], rounded[0]), "bfloat16 gives other numbers"


@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
def test_weights_stay_float32_under_their_names(kind: Any) -> None:
    layer = nn.Linear(32, 64)
    before = dict(layer.state_dict())
    eight_bits.EightBits(layer, kind, emulates=True)
    layer(torch.randn(3, 32)).float().sum().backward()
    assert layer.state_dict().keys() == before.keys()
    assert layer.weight.grad is not None
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    assert eight_bits.kind_in(copy.deepcopy(layer)) == kind


@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "pp=2"])
def test_layouts_that_cut_layers_or_inputs_are_refused_with_those_that_do_not(layout: str) -> None:
    with pytest.raises(LayoutError, match=f'Precision."fp8".* go with {layout[:2]}') as refused:
        eight_bits.check(Net(), FP8, parse(layout, 2, 2))
    assert '"ddp", "zero1", "zero2", "zero3" and "hsdp" take it' in str(refused.value)


def test_a_model_without_such_layers_is_refused_with_what_they_are() -> None:
    with pytest.raises(LayoutError, match="No layer of this model computes in fp8") as refused:
        eight_bits.check(Net(40), FP8, parse("ddp", 2, 2))
    assert "multiples of 16, inside repeated blocks" in str(refused.value)


def test_where_torchao_is_missing_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchao_products, "find_spec", lambda _name: None)
    with pytest.raises(LayoutError, match="torchao, which is not installed") as refused:
        eight_bits.check(Net(), FP8, parse("ddp", 2, 2))
    assert 'pip install "torchao>=0.18"' in str(refused.value)


@pytest.mark.parametrize(
    ("policy", "has", "is_refused"),
    [
        (FP8, (8, 9), False),
        (FP8, (8, 0), True),
        (MXFP8, (9, 0), True),
        (MXFP8, (10, 0), False),
        (Precision("bf16"), (7, 5), False),
    ],
)
def test_a_gpu_without_such_products_is_refused_with_its_capability(
    monkeypatch: pytest.MonkeyPatch, policy: Precision, has: tuple[int, int], is_refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: has)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
    if not is_refused:
        eight_bits.check_device(policy, "cuda")
        return
    with pytest.raises(LayoutError, match=f"has no products in {policy.compute}") as refused:
        eight_bits.check_device(policy, "cuda")
    assert f"and it has {has[0]}.{has[1]}" in str(refused.value)


def test_a_kind_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(LayoutError, match="Precision's compute is 'fp4'"):
        Precision("fp4")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="Precision's reduce is 'fp8'"):
        Precision("bf16", "fp8")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [FP8, MXFP8])
def test_a_gpu_gives_the_emulated_numbers(policy: Precision) -> None:
    """Sums are of another order there, and their rounding is bfloat16's."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try:
        eight_bits.check_device(policy, "cuda")
    except LayoutError as refused:
        pytest.skip(str(refused))
    torch.manual_seed(0)
    emulated, real = (nn.Linear(128, 256).cuda() for _ in range(2))
    real.load_state_dict(emulated.state_dict())
    eight_bits.EightBits(emulated, policy.compute, emulates=True)
    eight_bits.EightBits(real, policy.compute, emulates=False)
    x = torch.randn(40, 128, device="cuda")
    back = torch.randn(40, 256, device="cuda", dtype=torch.bfloat16)
    for a, b in zip(outcome(real, x, back), outcome(emulated, x, back), strict=True):
        assert float((a - b).norm() / b.norm()) < 0.02


@pytest.mark.parametrize("precision", [FP8, MXFP8])
@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_a_refused_axis_is_refused_with_its_own_reason(precision: Precision, axis: str) -> None:
    with pytest.raises(LayoutError) as told:
        eight_bits.check(Net(64), precision, parse(f"{axis}=2", 2, 2))
    assert f"with {axis} nothing of eight bits is proven" in str(told.value)
    assert "one scale" not in str(told.value)


def test_a_weight_that_is_quantized_already_computes_in_no_other_eight_bits() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = Net(64)
    quantization.quantize_(model.blocks[0], quantization.Int8WeightOnlyConfig())
    assert eight_bits.layers_of(model, FP8) == ["blocks.1.up", "blocks.1.down"]
