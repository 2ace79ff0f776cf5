"""A cluster over ssh: the cells of one machine on three, and what each of them can do wrong."""

import sys

import pytest

from tests.hosts.bed import Bed
from tests.hosts.kernel import Kernel

pytestmark = pytest.mark.hosts

START = "%load_ext nbdist\n%dist start --launcher ssh --trust-network --hosts "


def test_six_ranks_of_three_hosts_train_as_one(bed: Bed) -> None:
    with Kernel(bed["a"]) as kernel:
        print(kernel.run(START + "localhost:2,b:2,c:2"))
        said = kernel.run(
            "%%distributed\nimport os, socket\nt = torch.ones(1) * rank\ndist.all_reduce(t)\n"
            "print(rank, socket.gethostname(), *(os.environ[n] for n in ('LOCAL_RANK', "
            "'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE')), t.item())"
        )
        print(said)
        print(kernel.run("%dist status"))
        print(kernel.run("%dist stop"))
    assert bed["b"].left_running() == bed["c"].left_running() == []


def test_a_terminal_asks_the_notebooks_of_other_hosts(bed: Bed) -> None:
    ask = [sys.executable, "-m", "nbdist.cli", "status", "--on"]
    with Kernel(bed["a"]) as kernel:
        kernel.run("%load_ext nbdist\n%dist start -n 2")
        said = bed["b"].run([*ask, "a,c"], timeout_s=60).stdout
    assert said.startswith("a:\n2 ranks on cpu, gloo\nrank  host")
    assert "c:\nClusterError: None of your notebooks on this machine has a running cluster." in said
    refused = bed["b"].run([*ask, "nowhere"], timeout_s=60, check=False)
    assert "nowhere: no such name" in refused.stderr


def test_a_probe_finds_the_slow_link(bed: Bed) -> None:
    bed["c"].shape("100mbit")
    with Kernel(bed["a"]) as kernel:
        kernel.run(START + "localhost:1,b:1,c:1")
        kernel.run("found = nbdist.current().probe()")
        shown = kernel.run("for link in found: print(*link.ranks, link.bandwidth)")
    measured = {line[:3]: float(line[4:]) for line in shown.splitlines()}
    assert 4e6 < measured["0 2"] < 14e6  # 12.5 MB/s
    assert measured["0 1"] > 2 * measured["0 2"]
