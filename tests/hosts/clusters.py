"""A cluster over ssh from a notebook in a test host, and faults while its cells run."""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.hosts.bed import Bed
from tests.hosts.kernel import Kernel
from tests.hosts.waiting import wait_until

_START = "import os\nos.environ['NBDIST_STATIC'] = '1'\n%load_ext nbdist\n"
# Trains, and says at step 8 that it does: one file for each time that `name` is given.
TRAIN = """
import pathlib, time
if "model" not in globals():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    layout = nbdist.parallelize(model, "{layout}")
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(400, 4, generator=torch.Generator().manual_seed(5))
    train = nbdist.loader(data, global_batch=4, drop_last=True)
start = train.epoch
while train.epoch < start + 1:
    for x in train:
        model(x).pow(2).mean().backward(); opt.step(); opt.zero_grad()
        if train.consumed > 32:
            pathlib.Path({flag!r}).touch()
        time.sleep(0.02)
print("trained to", round(float(model.weight.detach().sum()), 6), "on", dist.get_world_size())
"""


def start(kernel: Kernel, hosts: str, *more: str, begin: str = "") -> str:
    """Start a cluster over ssh; return what is said."""
    words = " ".join(("--launcher ssh --trust-network --hosts", hosts, *more))
    return kernel.run(f"{_START}{begin}\n%dist start {words}")


def during(
    kernel: Kernel, bed: Bed, cell: str, act: Callable[[], object], timeout_s: float = 120
) -> tuple[str, float]:
    """Run a cell and do something once it has made the file `{flag}`.

    Returns:
        What the cell says, and how many seconds it took from then on.
    """
    flag = bed.shared / f"flag-{time.monotonic_ns()}"
    is_over = False

    def wait_and_act() -> float:
        wait_until(lambda: flag.exists() or is_over, "the cell comes this far", timeout_s)
        began = time.monotonic()
        if flag.exists():
            act()
        return began

    with ThreadPoolExecutor(1) as pool:
        acted = pool.submit(wait_and_act)
        try:
            said = kernel.run(cell.replace("{flag}", str(flag)), timeout_s)
        finally:
            is_over = True
        ended = time.monotonic()
        assert flag.exists(), said
        return said, ended - acted.result()


def hosts_of(kernel: Kernel) -> list[str]:
    """Return the host of each rank, as %dist status shows them."""
    rows = kernel.run("%dist status").splitlines()
    return [row.split()[1] for row in rows if re.match(r"\d+ +\S+ +cpu", row)]
