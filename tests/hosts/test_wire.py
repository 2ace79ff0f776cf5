"""Bytes on the wire between hosts, by their network cards' counters, against the formulas."""

import ast

import pytest

from tests.hosts.bed import Bed
from tests.hosts.clusters import start
from tests.hosts.kernel import Kernel

pytestmark = pytest.mark.hosts

_STEPS = 4
_MAKE = """%%distributed --no-track
from torch.nn import functional as F
from tests.group import wide_model
torch.manual_seed(0)
layout = nbdist.parallelize(wide_model.GPT(), "{layout}")
opt = layout.optimizer(torch.optim.SGD, lr=0.1)
x, y = (t[:2] for t in wide_model.batch())
def train(steps):
    for _ in range(steps):
        layout.step(x, y, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
        opt.step()
        opt.zero_grad()
train(2)
"""


def test_bytes_between_hosts_are_those_of_the_formulas_for_each_layout(bed: Bed) -> None:
    hosts = [bed[name] for name in "abc"]
    # In a ring over all ranks one rank of each host sends to another host; where tp stays within
    # the hosts, both ranks of a host have a ring of their own over the hosts.
    layouts = {"ddp": 1, "zero2": 1, "zero3": 1, "fsdp=3 tp=2": 2}
    with Kernel(bed["a"]) as kernel:
        start(kernel, "localhost:2,b:2,c:2", "--threads 1")
        for layout, rings in layouts.items():
            said = kernel.run(_MAKE.replace("{layout}", layout))
            assert "Error" not in said, said
            traffic = "nbdist.current().run('layout.explain(batch=x).traffic')[0].value"
            told = ast.literal_eval(kernel.run(f"print({traffic})"))
            before = [host.sent_bytes() for host in hosts]
            said = kernel.run(f"%%distributed --no-track\ntrain({_STEPS})")
            assert "Error" not in said, said
            sent = [host.sent_bytes() - was for host, was in zip(hosts, before, strict=True)]
            expected = rings * _STEPS * (told.get("dp", 0) + told.get("fsdp", 0))
            assert expected > 2e7
            # The notebook's host sends cells, too, and all send records.
            mean = sum(sent) / len(sent)
            assert mean == pytest.approx(expected, rel=0.03), (layout, sent, told)
