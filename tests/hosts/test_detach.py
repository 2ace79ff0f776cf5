"""A detached cluster over ssh: its kernel is killed, a host dies, and another kernel goes on."""

import os
import signal

import pytest

from tests.hosts.bed import Bed
from tests.hosts.kernel import Kernel
from tests.hosts.waiting import wait_until

pytestmark = pytest.mark.hosts

STEPS = 60


class Enough(Exception):
    """The cell has come as far as it should."""


def stop_at(word: str, said: str) -> None:
    """Stop to hear a cell that has said this."""
    if word in said:
        raise Enough


def test_a_cell_on_two_hosts_outlives_its_kernel_and_a_host_that_dies_meanwhile(bed: Bed) -> None:
    with Kernel(bed["a"]) as kernel:
        said = kernel.run(
            "%load_ext nbdist\n%dist start -n 2 --launcher ssh --trust-network "
            "--hosts localhost:1,b:1,c:1 --detach=far"
        )
        assert "%dist attach far" in said, said
        with pytest.raises(Enough):
            kernel.run(
                "%%distributed\nimport time\nkept = 7\n"
                "model = torch.nn.Linear(4, 1)\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
                f"for step in range({STEPS}):\n"
                "    loss = model(torch.ones(2, 4)).pow(2).mean()\n"
                "    loss.backward(); opt.step(); opt.zero_grad()\n"
                "    print(f'rank {rank} step {step}.', flush=True)\n    time.sleep(0.1)\nstep",
                watch=lambda said: stop_at("step 5.", said),
            )
        os.kill(kernel.pid, signal.SIGKILL)
    with Kernel(bed["a"]) as kernel:
        assert "Attached to far: 2 ranks on cpu" in kernel.run("%load_ext nbdist\n%dist attach far")
        shown = kernel.run(
            "for r in nbdist.current().last.values():\n    print(r.value, r.error, r.text)\n"
            "print(nbdist.client.notebook.current.runs())"
        )
        for rank in range(2):
            assert [f"rank {rank} step {n}." in shown for n in range(STEPS)] == [True] * STEPS
        assert shown.count(f"{STEPS - 1} None rank") == 2, shown
        assert f"finished  2      {STEPS} " in shown, shown
        os.kill(kernel.pid, signal.SIGKILL)
    bed["b"].power_cut()
    with Kernel(bed["a"]) as kernel:
        said = kernel.run("%load_ext nbdist\n%dist attach")
        assert "Rank 1 had died since the last cell (its host b is lost" in said, said
        said = kernel.run("%%distributed\nimport socket\nprint(socket.gethostname(), rank + kept)")
        assert "c 8" in said, said
        kernel.run("%dist stop")
        wait_until(lambda: bed["c"].left_running() == [], "all to end on c")
