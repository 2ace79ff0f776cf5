"""A cluster over ssh: the cells of one machine on three, and what each of them can do wrong."""

import re
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
        # Texts have one order in a set on all hosts, whose processes share no parent.
        hashes = kernel.run("%%distributed\nprint('hash', hash('a text'))")
        assert len(set(re.findall(r"hash (-?\d+)", hashes))) == 1
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
