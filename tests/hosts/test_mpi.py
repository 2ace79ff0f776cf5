"""A cluster over `mpiexec`, of three MPIs: the ranks' places, an end by kill -9, bad input."""

import os
import signal

import pytest

from tests.hosts import install
from tests.hosts.bed import Bed
from tests.hosts.kernel import Kernel
from tests.hosts.waiting import wait_until

pytestmark = pytest.mark.hosts

# What comes first in PATH, so that `mpiexec` is this MPI's.
PATHS = {"MPICH": "", "Open MPI 4": "/usr/bin:", "Open MPI 5": f"{install.OPEN_MPI_5}/bin:"}
BE_ROOT = "os.environ.update(OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1')"
START = "%dist start --launcher mpi --trust-network --hosts "
LOOK = """\
import os
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
seen = (os.uname().nodename, *(os.environ.get(name) for name in names))
leaked = [name for name in os.environ if name.startswith(("OMPI_", "PMI", "PRTE_", "HYD"))]
total = torch.ones(1) * rank
dist.all_reduce(total)
total = total.item()
"""


def load(kernel: Kernel, mpi: str) -> None:
    kernel.run(f"import os\nos.environ['PATH'] = {PATHS[mpi]!r} + os.environ['PATH']")
    kernel.run("%load_ext nbdist")


@pytest.mark.parametrize("mpi", PATHS)
def test_ranks_have_the_places_of_hosts_and_end_with_a_killed_kernel(bed: Bed, mpi: str) -> None:
    if mpi == "Open MPI 5" and not (install.OPEN_MPI_5 / "bin" / "mpiexec").exists():
        pytest.skip("Open MPI 5 is missing: python -m tests.hosts.install")
    with Kernel(bed["a"]) as kernel:
        load(kernel, mpi)
        kernel.run(BE_ROOT)
        assert "Started 4 ranks" in kernel.run(START + "c:2,b:2")
        kernel.run("%%distributed\n" + LOOK)
        kernel.run("%dist pull seen leaked total")
        assert kernel.run("for one in seen: print(*one)").splitlines() == [
            "c 0 0 2 0",
            "c 1 1 2 0",
            "b 2 0 2 1",
            "b 3 1 2 1",
        ]
        # A library would take a rank that has them for the one process of its mpiexec.
        assert kernel.run("print(leaked, *total)") == "[[], [], [], []] 6.0 6.0 6.0 6.0\n"

        os.kill(kernel.pid, signal.SIGKILL)

        wait_until(lambda: not bed["b"].left_running() + bed["c"].left_running(), "all ends")


def test_what_mpiexec_refuses_is_one_sentence(bed: Bed) -> None:
    bed["d"].refuse_keys()
    with Kernel(bed["a"]) as kernel:
        load(kernel, "Open MPI 4")
        assert "b: Open MPI refuses to run as root" in kernel.run(START + "b:2")
        kernel.run(BE_ROOT)
        said = kernel.run(START + "b:1,d:1,nowhere:1")
        assert "d: it refuses your key" in said
        assert "nowhere: no such name" in said
        assert "--launcher mpi needs hosts." in kernel.run(START.removesuffix("--hosts "))
        kernel.run("os.environ['PATH'] = '/nowhere'")
        assert "mpiexec is not on this machine." in kernel.run(START + "b:1")
    assert bed["b"].left_running() == bed["d"].left_running() == []
