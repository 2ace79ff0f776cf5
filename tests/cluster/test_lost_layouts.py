"""A model that is built anew after a rank has died with a part of the old one."""

import pytest

import nbdist

TRAIN = """
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

torch.manual_seed(seed)
{name} = nn.Sequential(Block(), Block())
nbdist.parallelize({name}, "tp=2")
optimizer = torch.optim.SGD({name}.parameters(), lr=0.1)
for step in range(2):
    {name}(torch.ones(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.timeout(120)
def test_it_is_not_compared_with_the_old_one_that_another_rank_still_has(
    session: nbdist.Session,
) -> None:
    session.run(TRAIN.replace("{name}", "old"), params={"seed": 0}, track=False)
    session.run("kept = [old]", track=False)
    with pytest.raises(nbdist.RankError, match="build them again"):
        session.run("import os\nif rank == 1: os.kill(os.getpid(), 9)", track=False)
    session.run(TRAIN.replace("{name}", "new"), params={"seed": 1}, track=False)
    assert session.checks().found == {}
