"""What can happen to a host, a link or a process of a cluster, and what a person reads of it."""

import os
import signal
from contextlib import suppress

import psutil
import pytest

from tests.hosts.bed import Bed
from tests.hosts.clusters import during, hosts_of, start
from tests.hosts.host import Host
from tests.hosts.kernel import Kernel
from tests.hosts.waiting import wait_until

pytestmark = pytest.mark.hosts

MEET = """%%distributed --no-track
import os, pathlib, time
while True:
    dist.all_reduce(torch.ones(1000))
    pathlib.Path("{flag}").touch()
    time.sleep(0.02)
"""
SILENT = "its host c is lost: it did not answer for 4 s"


def kill(host: Host, words: str) -> None:
    """Kill the processes of a host whose command line has these words."""
    found = [p for pid in host.pids() if words in " ".join((p := psutil.Process(pid)).cmdline())]
    assert found, words
    for process in found:
        with suppress(psutil.NoSuchProcess):  # what it had forked ends with the one before
            process.kill()


def test_a_host_that_goes_silent_is_named_its_ranks_end_and_it_is_taken_again(bed: Bed) -> None:
    a, c = bed["a"], bed["c"]
    with Kernel(a) as kernel:
        start(kernel, "localhost:1,b:1,c:1")
        faults = {
            "a cable that is pulled": (c.link_down, c.link_up, SILENT),
            "nothing gets in": (lambda: c.cut("in"), bed.switch.deliver_all, SILENT),
            "nothing gets out": (lambda: c.cut("out"), bed.switch.deliver_all, SILENT),
            "all is stopped": (c.pause, c.resume, SILENT),
            "the parent": (
                lambda: kill(c, "nbdist.host.parent stdio"),
                lambda: None,
                "its host c is lost: its parent process was killed",
            ),
            "ssh": (
                lambda: kill(a, "-- c exec sh"),
                lambda: None,
                "its host c is lost: its ssh was ended by signal 9",
            ),
        }
        for what, (strike, mend, words) in faults.items():
            said, _ = during(kernel, bed, MEET, strike)
            assert f"rank 2 (c, cpu) died: {words}" in said, what
            assert "There are 2 ranks now." in said, what
            assert hosts_of(kernel) == ["a", "b"], what
            mend()
            wait_until(lambda: not c.left_running(), "nothing of the old ranks stays")
            assert "Host c is back." in kernel.run("%dist scale 3"), what
        assert hosts_of(kernel) == ["a", "b", "c"]


def test_ranks_and_processes_that_are_killed_are_told_wherever_they_run(bed: Bed) -> None:
    a, b, c = bed["a"], bed["b"], bed["c"]
    with Kernel(a) as kernel:
        start(kernel, "localhost:1,b:1,c:1")
        said = kernel.run(
            "%%distributed --no-track\nimport os, signal\nkept = rank\n"
            "if rank == 2: os.write(2, b'the last words of c\\n'); os.kill(os.getpid(), 9)\n"
            "dist.all_reduce(torch.ones(1))"
        )
        assert "rank 2 (c, cpu) died: killed by SIGKILL" in said
        assert "the last words of c" in said
        assert "Rank 2 was replaced by a new process" in said

        wait = MEET.replace("    dist", "    if rank == 2: time.sleep(60)\n    dist").replace(
            "while True:", "pathlib.Path('{flag}').touch()\nwhile True:"
        )
        said, _ = during(kernel, bed, wait, lambda: os.kill(kernel.pid, signal.SIGINT))
        assert "KeyboardInterrupt: All ranks have stopped." in said
        assert hosts_of(kernel) == ["a", "b", "c"]

        said, _ = during(kernel, bed, MEET, lambda: kill(a, "nbdist.host.keeper"))
        assert "the process that reaches it has ended" in said
        wait_until(lambda: not b.left_running() + c.left_running(), "no host keeps anything")
        kernel.run("%dist restart")
        assert hosts_of(kernel) == ["a", "b", "c"]

        os.kill(kernel.pid, signal.SIGKILL)
        c.cut("in")
        wait_until(lambda: not a.left_running() + b.left_running(), "all ends with the kernel")
        wait_until(lambda: not _of_ranks(c), "and where the network is cut, with the lease")


def _of_ranks(host: Host) -> list[str]:
    """Return what runs there, but for a login's sshd, which waits for its network."""
    return [line for line in host.left_running() if "sshd" not in line]


@pytest.mark.parametrize(
    ("helper", "why"),
    [
        ("bin/python -m nbdist.host.parent", "its parent process was ended by signal 9"),
        ("bin/python -m nbdist.host.keeper", "the process that reaches it has ended"),
    ],
    ids=["parent", "keeper"],
)
def test_a_helper_lost_beside_the_notebook_is_one_error_and_a_start_works_again(
    bed: Bed, helper: str, why: str
) -> None:
    a, b, c = bed["a"], bed["b"], bed["c"]
    hosts = "b:1,c:1"  # controller and store alone are on the notebook's machine
    told = f"ipyparallel's controller has ended (its host a is lost: {why}): the ranks cannot"
    with Kernel(a) as kernel:
        start(kernel, hosts)
        for again in ("%dist restart", "%dist stop"):
            said, _ = during(kernel, bed, MEET, lambda: kill(a, helper))
            assert said.count("Error: ") == said.count(told) == said.count("Do:  ") == 1, said
            assert kernel.run("%%distributed\n1").startswith(f"ClusterError: {told}")
            kernel.run(again)
            if again == "%dist stop":
                wait_until(lambda: not b.left_running() + c.left_running(), "no host keeps any")
                start(kernel, hosts)
            assert hosts_of(kernel) == ["b", "c"]
            said = kernel.run("%%distributed\nprint('on', dist.get_world_size())")
            assert "ranks 0-1 │ on 2" in said
        kernel.run("%dist stop")
        left = [line for host in (a, b, c) for line in host.left_running()]
        assert not [line for line in left if "nbdist." in line]
