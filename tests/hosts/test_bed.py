"""The test hosts keep what they promise to the tests that stand on them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.groups import ROOT
from tests.hosts import commands
from tests.hosts.bed import Bed
from tests.hosts.host import Host
from tests.hosts.kernel import Kernel
from tests.hosts.namespaces import child_pid
from tests.hosts.waiting import wait_until

pytestmark = pytest.mark.hosts

_SSH = ("ssh", "-o", "BatchMode=yes")
# A lost peer is noticed after three seconds of silence.
_IMPATIENT = ("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2")


def _logs_in(host: Host, peer: str) -> bool:
    """Return whether `peer` lets `host` in within 2 s: that takes packets in both directions."""
    command = [*_SSH, "-o", "ConnectTimeout=2", *_IMPATIENT, peer, "true"]
    return host.run(command, check=False).returncode == 0


def _wait_for_login(host: Host, peer: str) -> None:
    wait_until(lambda: _logs_in(host, peer), f"{host.name} reaches {peer}")


def test_ssh_reaches_another_host_without_a_question(bed: Bed) -> None:
    done = bed["a"].run([*_SSH, "b", "hostname; echo $SSH_CONNECTION"])

    assert done.stdout.splitlines()[0] == "b"
    assert bed["a"].address in done.stdout
    wait_until(lambda: bed["b"].left_running() == [], "sshd ends its session")


def test_scp_copies_a_file(bed: Bed) -> None:
    bed["a"].write("x.txt", "from a")

    bed["a"].run(["scp", "-q", "x.txt", "b:y.txt"])

    assert bed["b"].path("y.txt").read_text() == "from a"


def test_hosts_share_python_and_nbdist_but_no_home_and_no_memory(bed: Bed) -> None:
    bed["a"].write("mine", "")
    bed["a"].path("/dev/shm/mine").touch()
    bed["a"].path("/tmp/mine").touch()
    look = (
        "import nbdist, os; there = [*os.listdir('/dev/shm'), *os.listdir('/tmp')]; "
        "print('mine' in there, nbdist.__file__)"
    )

    seen = bed["b"].run([sys.executable, "-c", look]).stdout

    assert seen.split()[0] == "False"
    assert Path(seen.split()[1]) == ROOT / "nbdist/__init__.py"
    assert "mine" not in bed["b"].run(["ls", "-a"]).stdout
    read_only = bed["b"].run(["touch", str(Path(__file__).parent / "x")], check=False)
    assert "Read-only file system" in read_only.stderr


def test_the_sum_over_three_hosts_crosses_their_cards_as_a_ring_does(bed: Bed) -> None:
    elements, hosts = 6_000_000, [bed[name] for name in "abc"]
    script = str(Path(__file__).with_name("all_reduce.py"))
    ranks = [
        host.popen([sys.executable, script, str(rank), "3", "a", str(elements)])
        for rank, host in enumerate(hosts)
    ]
    assert [_line(rank) for rank in ranks] == ["ready"] * 3
    before = [host.sent_bytes() for host in hosts]
    _press_enter(ranks)
    sums = [_line(rank) for rank in ranks]
    sent = [host.sent_bytes() - count for host, count in zip(hosts, before, strict=True)]
    _press_enter(ranks)
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]

    assert sums == ["6.0"] * 3, errors
    # A ring of p sends 2 (p - 1) / p of the tensor from each, and headers.
    assert sent == [pytest.approx(4 / 3 * 4 * elements, rel=0.03)] * 3


def test_a_kernel_in_a_host_is_driven_from_the_test(bed: Bed) -> None:
    with Kernel(bed["c"]) as kernel:
        assert kernel.run("import socket; print(socket.gethostname())") == "c\n"
        assert "ZeroDivisionError" in kernel.run("1 / 0")
        show = "shown = display('early', display_id=True); print('between'); shown.update('late')"
        assert kernel.run(show) == "'late'\nbetween\n"
        os.kill(kernel.pid, signal.SIGKILL)
    wait_until(lambda: bed["c"].left_running() == [], "the kernel is gone")


def test_a_power_cut_ends_ssh_only_by_silence_and_the_host_comes_back(bed: Bed) -> None:
    login = bed["a"].popen([*_SSH, *_IMPATIENT, "b", "echo in; sleep 600"])
    assert _line(login) == "in"

    bed["b"].power_cut()

    assert "not responding" in login.communicate(timeout=60)[1]
    bed["b"].power_on()
    _wait_for_login(bed["a"], "b")


def test_a_shutdown_closes_the_connections(bed: Bed) -> None:
    login = bed["a"].popen([*_SSH, "b", "echo in; sleep 600"])
    assert _line(login) == "in"

    bed["b"].shut_down()

    assert "closed by remote host" in login.communicate(timeout=60)[1]


def test_a_pulled_cable_loses_packets_until_it_is_plugged_in(bed: Bed) -> None:
    bed["b"].link_down()
    assert not _logs_in(bed["a"], "b")

    bed["b"].link_up()
    _wait_for_login(bed["a"], "b")


def test_a_cut_in_one_direction_lets_the_other_pass(bed: Bed) -> None:
    # Neighbours are known, as between hosts that have talked for long.
    _wait_for_login(bed["a"], "b")
    hear = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('b', 9)); "
        "print('ready', flush=True); print(s.recv(9).decode())"
    )
    listener = bed["b"].popen([sys.executable, "-c", hear])
    assert _line(listener) == "ready"

    bed["b"].cut("out", peer=bed["a"])

    assert not _logs_in(bed["a"], "b")
    bed["a"].run(["bash", "-c", "echo hello > /dev/udp/b/9"])
    assert _line(listener) == "hello"
    _wait_for_login(bed["c"], "b")


def test_a_paused_host_does_nothing_until_it_is_resumed(bed: Bed) -> None:
    counter = bed["b"].popen(["bash", "-c", "while read -r line; do echo $line; done"])
    bed["b"].pause()
    assert counter.stdin is not None
    counter.stdin.write("hello\n")
    counter.stdin.flush()
    stat = Path(f"/proc/{child_pid(counter)}/stat").read_text()
    assert stat.rpartition(")")[2].split()[0] == "T"

    bed["b"].resume()

    assert _line(counter) == "hello"


def test_a_shaped_link_is_not_faster_than_its_rate(bed: Bed) -> None:
    bed["b"].shape("80mbit")
    started = time.monotonic()
    bed["a"].run([*_SSH, "b", "head -c 10M /dev/zero"])
    # A lower bound holds under any load: 10 MiB, less a bucket, cannot take less than a second.
    assert time.monotonic() - started > 1.0
    assert bed["b"].sent_bytes() > 10 << 20


def test_a_delayed_link_carries_all_bytes_late(bed: Bed) -> None:
    connect = "import socket, time; t = time.monotonic(); socket.create_connection(('b', 22)); "
    connect += "print(time.monotonic() - t)"
    bed["b"].delay(0.05)
    bed["b"].run(["bash", "-c", "head -c 5M /dev/urandom > x"])

    assert float(bed["a"].run([sys.executable, "-c", connect]).stdout) >= 0.1
    bed["a"].run(["scp", "-q", "b:x", "x"])
    assert bed["a"].run(["sha256sum", "x"]).stdout == bed["b"].run(["sha256sum", "x"]).stdout


def test_a_clock_can_be_wrong_by_an_hour_also_over_ssh(bed: Bed) -> None:
    bed["b"].shift_clock(3600)

    assert bed["b"].run(["date", "-d", "-59 minutes", "+%s"]).stdout > str(int(time.time()))
    read = f"{sys.executable} -c 'import time; print(time.time())'"
    ahead_s = float(bed["a"].run([*_SSH, "b", read]).stdout) - time.time()
    assert ahead_s == pytest.approx(3600, abs=60)


def test_a_firewall_drops_or_refuses_a_range_of_ports(bed: Bed) -> None:
    bed["b"].block_ports("20-30", "reject")
    bed["c"].block_ports("22", "drop")

    refused = bed["a"].run([*_SSH, "b", "true"], check=False).stderr
    dropped = bed["a"].run([*_SSH, "-o", "ConnectTimeout=1", "c", "true"], check=False).stderr

    assert "Connection refused" in refused
    assert "timed out" in dropped
    _wait_for_login(bed["b"], "a")


def test_a_full_disk_has_no_byte_left(bed: Bed) -> None:
    bed["b"].fill_disk()
    for place in ("~", "/tmp"):
        write = f"head -c 100000 /dev/zero > {place}/x"
        assert "No space left" in bed["b"].run(["bash", "-c", write], check=False).stderr

    bed["b"].free_disk()
    bed["b"].run(["bash", "-c", "head -c 100000 /dev/zero > ~/x"])


def test_a_host_can_refuse_keys_lack_a_package_have_another_and_debians_name(bed: Bed) -> None:
    bed["b"].refuse_keys()
    bed["c"].hide(f"{sys.prefix}/lib")
    bed["d"].name_itself("127.0.1.1")

    refused = bed["a"].run([*_SSH, "b", "true"], check=False).stderr
    torch = bed["c"].run([sys.executable, "-c", "import torch"], check=False).stderr

    bed["a"].replace(f"{ROOT}/nbdist/__init__.py", "__version__ = '9'")
    other = bed["a"].run([sys.executable, "-c", "import nbdist; print(nbdist.__version__)"]).stdout

    assert "Permission denied (publickey)" in refused
    assert other == "9\n"
    assert "No module named 'torch'" in torch
    assert bed["d"].run(["getent", "ahostsv4", "d"]).stdout.split()[0] == "127.0.1.1"
    assert bed["a"].run(["getent", "ahostsv4", "d"]).stdout.split()[0] == bed["d"].address


def test_a_reset_leaves_no_fault_and_no_process(bed: Bed) -> None:
    bed["a"].popen(["sleep", "600"])
    bed["b"].power_cut()
    bed["c"].cut("in")

    bed.reset()

    assert [host.left_running() for host in bed.hosts.values()] == [[]] * 4
    for peer in "bcd":
        _wait_for_login(bed["a"], peer)


def test_a_command_that_hangs_is_ended_with_its_children(bed: Bed) -> None:
    with pytest.raises(commands.CommandFailed, match="did not end in 1 s"):
        bed["a"].run(["bash", "-c", "sleep 600 & sleep 600"], timeout_s=1)
    wait_until(lambda: bed["a"].left_running() == [], "both are gone")


def test_nothing_is_left_of_a_bed_that_is_closed() -> None:
    bed = Bed(["a", "b"])
    bed["a"].popen([*_SSH, "b", "sleep", "600"])

    bed.close()

    wait_until(lambda: bed.leftovers() == [], "namespaces, processes, mounts and files are gone")


def test_no_process_is_left_when_the_test_itself_is_killed(tmp_path: Path) -> None:
    code = (
        "import time; from tests.hosts.bed import Bed; bed = Bed(['a', 'b'])\n"
        "print(*[host.namespace.pid for host in bed.hosts.values()], flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in _line(process).split()]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)

    process.kill()
    process.communicate()

    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "both hosts are gone"
    )
    for folder in Path("/var/tmp").glob(f"nbdist-hosts-{process.pid}-*"):
        commands.call(["rm", "-r", str(folder)])


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def _press_enter(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
