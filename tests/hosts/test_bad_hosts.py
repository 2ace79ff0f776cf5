"""Hosts that cannot be used: one error names all of them, in seconds, and nothing is left."""

import os
import signal
import sys
import threading

import pytest

from tests.hosts.bed import Bed
from tests.hosts.clusters import start
from tests.hosts.host import Host
from tests.hosts.kernel import Kernel
from tests.hosts.waiting import wait_until

pytestmark = pytest.mark.hosts


def test_all_hosts_that_cannot_be_reached_are_named_in_one_error(bed: Bed) -> None:
    b, c = bed["b"], bed["c"]
    b.link_down()
    c.refuse_keys()
    known = bed["a"].path(".ssh/known_hosts")
    known.write_text("".join(x for x in known.read_text().splitlines(True) if x[:2] != "d,"))
    bed["a"].is_touched = bed["d"].is_touched = True
    with Kernel(bed["a"]) as kernel:
        said = start(kernel, "localhost:1,b:1,c:1,d:1,nowhere:1")
        assert "b, c, d, nowhere cannot be used, so nothing was started." in said
        assert "b: it does not answer" in said
        assert "c: it refuses your key" in said
        assert "d: its key is not known here, or has changed" in said
        assert "nowhere: no such name" in said
        assert not [line for line in bed["a"].left_running() if "nbdist.host" in line]


def test_a_python_that_does_not_fit_is_told_of_each_host(bed: Bed) -> None:
    a, b, c, d = (bed[name] for name in "abcd")
    # One Python without packages, and one with another torch, as far as its metadata tell.
    _write_python(c, "env -u PYTHONPATH", "-S")
    _write_python(d, "env PYTHONPATH=/root/other:$PYTHONPATH", "")
    info = "/root/other/torch-1.0.dist-info"
    d.run(["mkdir", "-p", info])
    d.write(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    with Kernel(a) as kernel:
        a.write("hosts", "localhost\nb python=/nowhere/python\nc python=/root/python\n")
        said = start(kernel, "hosts")
        assert "b, c cannot be used" in said
        assert "b: it has no such Python" in said
        assert "c: its Python has no nbdist" in said

        a.write("hosts", "localhost\nd slots=2 python=/root/python\n")
        said = start(kernel, "hosts")
        assert "d and the notebook differ in torch." in said
        assert "d          1.0" in said

        b.fill_disk()
        a.write("hosts", "localhost\nb\n")
        said = start(kernel, "hosts")
        assert "b cannot take ranks." in said
        assert "No space left on device" in said
        assert b.left_running() == d.left_running() == []


def _write_python(host: Host, before: str, option: str) -> None:
    host.write("python", f'#!/bin/sh\nexec {before} {sys.executable} {option} "$@"\n')
    host.run(["chmod", "+x", "python"])
    host.is_touched = True


def test_blocked_ports_are_told_by_the_pair_of_hosts(bed: Bed) -> None:
    bed["c"].block_ports("1024-65535")
    with Kernel(bed["a"]) as kernel:
        said = start(kernel, "localhost:1,b:1,c:1")
        assert "a, b cannot reach c (10.77.0.3)" in said
        assert bed["b"].left_running() == bed["c"].left_running() == []


def test_a_strange_login_and_a_name_on_loopback_do_no_harm(bed: Bed) -> None:
    b = bed["b"]
    b.write(".bashrc", "echo Welcome to b\necho and mind your step >&2\n")
    b.name_itself("127.0.1.1")
    bed["a"].name_itself("127.0.1.1")
    with Kernel(bed["a"]) as kernel:
        said = start(kernel, "localhost:1,b:1")
        assert "Started 2 ranks" in said
        said = kernel.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(t.item())")
        assert "2.0" in said
        kernel.run("%dist stop")
        assert b.left_running() == []

        # Interrupted while it starts.
        pid = kernel.pid

        def interrupt() -> None:
            wait_until(lambda: b.left_running(), "the start has reached b")
            os.kill(pid, signal.SIGINT)

        waiting = threading.Thread(target=interrupt)
        waiting.start()
        said = start(kernel, "localhost:1,b:1")
        waiting.join()
        assert "KeyboardInterrupt: %dist start was stopped." in said
        wait_until(lambda: not b.left_running(), "nothing is left on b")
