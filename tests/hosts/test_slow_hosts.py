"""A host that is slow, and a link to one, are told apart by what ranks measure over the network."""

import pytest

from tests.hosts.bed import Bed
from tests.hosts.clusters import start
from tests.hosts.kernel import Kernel

pytestmark = pytest.mark.hosts

_TRAIN = """%%distributed --no-track
import time
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 8))
nbdist.parallelize(model, "ddp")
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range({steps}):
    time.sleep(0.02 + (0.03 if rank == {slow} else 0))
    model(torch.ones(8, 512)).sum().backward(); opt.step(); opt.zero_grad()
"""
_VERDICTS = "for one in nbdist.current().verdicts: print(one.rank, one.cause, one.sentence)"


def test_a_slow_host_and_a_slow_link_are_named(bed: Bed) -> None:
    with Kernel(bed["a"]) as kernel:
        start(kernel, "localhost:1,b:1,c:1", "--threads 1")
        kernel.run(_TRAIN.format(slow=2, steps=60))
        said = kernel.run(_VERDICTS)
        assert said.startswith("2 forward Rank 2 takes "), said

        bed["c"].shape("60mbit")
        kernel.run(_TRAIN.format(slow=None, steps=120))
        said = kernel.run(_VERDICTS)
        assert said.startswith("2 link The link of rank 2 is slow: "), said
