"""Weights that torchao has quantized, in a session: a rank dies, and a checkpoint is restored."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import nbdist

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is not installed (pip install '.[test]')"
)

BEGIN = """
import os
from torchao.quantization import Int8WeightOnlyConfig, quantize_
def make():
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    quantize_(net, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
    net[0].bias.requires_grad_(False)
    return net
def parts():
    live = net[0].weight.qdata, net[0].weight.scale, *net[2].parameters()
    return [part.detach().clone() for part in live]
net = make()
layout = nbdist.parallelize(net, "ddp")
frozen = make()  # such as a teacher
opt = layout.optimizer(torch.optim.AdamW, lr=0.01)
data = torch.randn(64, 32, generator=torch.Generator().manual_seed(5))
train, made = nbdist.loader(data, global_batch=8, seed=3), 0
"""
LOOP = """
for x in train:
    net(x).pow(2).mean().backward()
    made += 1
    if made == 5 and rank == 1 and not os.path.exists({flag!r}):
        open({flag!r}, "w").close()
        os.kill(os.getpid(), 9)
    opt.step(); opt.zero_grad()
[part.tolist() for part in parts()]
"""
RESTORE = """
before = parts()
nbdist.save("quantized")
with torch.no_grad():
    for part in (net[0].weight.qdata, net[0].weight.scale, *net[2].parameters()):
        part.zero_()
nbdist.restore("quantized")
[torch.equal(one, other) for one, other in zip(before, parts())]
"""


def test_a_replacement_rank_and_a_checkpoint_have_quantized_weights_as_they_were(
    session: nbdist.Session, tmp_path: Path
) -> None:
    def ends(flag: Path) -> list[Any]:
        session.run(BEGIN, track=False)
        return list(session.run(LOOP.format(flag=str(flag)), retry=1, track=False).value_list)

    never = tmp_path / "never"
    never.touch()
    unbroken, broken = ends(never), ends(tmp_path / "flag")
    assert (tmp_path / "flag").exists()
    assert broken == unbroken
    assert broken[0] == broken[1]
    assert session.run(RESTORE, track=False).value_list == [[True] * 4] * 2
