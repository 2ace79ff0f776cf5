"""`Precision("fp8")` and `"mxfp8"` on ranks: as one process, and as torchao converts a model."""

from pathlib import Path
from typing import Any

import pytest

import nbdist
from tests.cluster.conftest import Kernel

BEGIN = """
import copy
import torch.nn.functional as F
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.up, self.down = (torch.nn.Linear(*s) for s in ((64, 128), (128, 64)))
    def forward(self, x): return x + self.down(self.up(self.norm(x)).relu())
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(64, 16)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
def begin(text, kind):
    torch.manual_seed(0)
    net = Net()
    return net, copy.deepcopy(net), nbdist.parallelize(net, text, nbdist.Precision(kind))
def batch(part):
    torch.manual_seed(part)
    return torch.randn(10, 64), torch.randn(10, 16)
whole = lambda t: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach()
"""
VERIFY = """
net, plain, layout = begin({text!r}, {kind!r})
opt = layout.optimizer(torch.optim.AdamW, lr=0.01)
x, y = batch(layout.shape.data_part(rank)[0])
proof = layout.verify((x, y), F.mse_loss, optimizer=opt)
state = layout.state_dict()
same = {{n: torch.equal(t, plain.state_dict()[n]) for n, t in state.items()}}
proof.ok, repr(proof), repr(layout.explain()), all(same.values()), len(same)
"""
AGAINST_TORCHAO = """
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
net, plain, layout = begin("zero3", "fp8")
F.mse_loss(net(batch(rank)[0]), batch(rank)[1]).backward()
# The whole model in bfloat16, gradients added up in float32: FSDP2's way.
plain = convert_to_float8_training(
    plain.bfloat16(), module_filter_fn=lambda _, name: name != "head",
    config=Float8LinearConfig(emulate=True),
)
sums = {n: 0 for n, _ in plain.named_parameters()}
for part in range(2):
    x, y = batch(part)
    F.mse_loss(plain(x.bfloat16()).float(), y).backward()
    sums = {n: sums[n] + p.grad.float() / 2 for n, p in plain.named_parameters()}
    plain.zero_grad()
max(float((whole(p.grad) - sums[n]).abs().max()) for n, p in net.named_parameters())
"""
TRAIN = """
net, plain, layout = begin({text!r}, "fp8")
opt = layout.optimizer(torch.optim.AdamW, lr=0.01)
data = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
train, made = nbdist.loader(data, global_batch=8, seed=3), 0
"""
LOOP = """
import os
for x in train:
    net(x).pow(2).mean().backward()
    made += 1
    if made == 5 and rank == 1 and not os.path.exists({flag!r}):
        open({flag!r}, "w").close()
        os.kill(os.getpid(), 9)
    opt.step(); opt.zero_grad()
[whole(p).tolist() for p in net.parameters()]
"""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("fp8", "ddp"),
        ("mxfp8", "tp=2"),
        pytest.param("fp8", "zero3", marks=pytest.mark.slow),
        pytest.param("mxfp8", "zero2", marks=pytest.mark.slow),
        pytest.param("fp8", "zero1", marks=pytest.mark.slow),
        pytest.param("fp8", "zero2", marks=pytest.mark.slow),
        pytest.param("mxfp8", "ddp", marks=pytest.mark.slow),
        pytest.param("mxfp8", "zero3", marks=pytest.mark.slow),
    ],
)
def test_a_layout_computes_as_one_process_and_says_what_eight_bits_cost(
    session: nbdist.Session, kind: str, text: str
) -> None:
    ran = session.run(BEGIN + VERIFY.format(kind=kind, text=text), track=False)
    ok, proof, explained, is_same, count = ran.value_list[0]
    assert ok, proof
    assert f"over 3 steps, in {kind}, with AdamW" in proof
    assert f"In {kind} the loss of one process is up to" in proof
    assert "% from that of float64" in proof
    assert f"4 of 5 Linear layers (blocks.0.up, blocks.0.down, blocks.1.up, ...) in {kind}" in (
        explained
    )
    assert "emulated and so not faster" in explained
    assert is_same, "what is saved are the float32 weights"
    assert count == 14


def test_gradients_are_those_of_a_model_that_torchao_has_converted(session: nbdist.Session) -> None:
    ran = session.run(BEGIN + AGAINST_TORCHAO, track=False)
    assert ran.value_list == [0.0, 0.0]


def test_a_replacement_rank_computes_in_eight_bits_too(
    session: nbdist.Session, tmp_path: Path
) -> None:
    def ends(flag: Path) -> list[Any]:
        session.run(BEGIN + TRAIN.format(text="ddp"), track=False)
        ran = session.run(LOOP.format(flag=str(flag)), retry=1, track=False)
        return list(ran.value_list)

    never = tmp_path / "never"
    never.touch()
    unbroken, broken = ends(never), ends(tmp_path / "flag")
    assert (tmp_path / "flag").exists()
    assert broken == unbroken


def test_emulation_is_said_once_where_the_model_is_spread(notebook: Kernel) -> None:
    said = notebook.cell(f"{BEGIN}\nnet, plain, layout = begin('ddp', 'fp8')").text
    assert said.count("fp8 is emulated on CPUs") == 1
    assert "a step takes longer than in bf16" in said
