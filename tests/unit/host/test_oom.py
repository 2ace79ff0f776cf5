"""Whether the kernel's OOM killer ended a process, from what Linux writes."""

import os
import signal
from pathlib import Path

import pytest

from nbdist.host import oom
from nbdist.shared.processes.ended import Ended, EndKind

KILLED = (
    "3,442,5588699356,-;Out of memory: Killed process 15327 (python) total-vm:35712552kB, "
    "anon-rss:23078952kB, file-rss:60kB, shmem-rss:0kB, UID:0 pgtables:45560kB oom_score_adj:0\n"
)
KILLED_IN_CGROUP = (
    "3,9,12000000,-;Memory cgroup out of memory: Killed process 77 (python) total-vm:99kB, "
    "anon-rss:81920kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0\n"
)
NOISE = "6,1,100,-;eth0: link up\n SUBSYSTEM=net\n"


def test_the_kernels_log_names_a_process_that_was_ended_and_what_it_held() -> None:
    ended = oom.find_kill([NOISE, KILLED], 15327, began=5000.0)
    assert ended == Ended(EndKind.OOM_KILLER, signal.SIGKILL, detail="it held 24 GB")
    assert "84 MB" in str(oom.find_kill([KILLED_IN_CGROUP], 77, began=3.0))


def test_another_process_and_an_older_one_of_the_same_number_are_not_meant() -> None:
    assert oom.find_kill([NOISE, KILLED], 1532, began=5000.0) is None
    assert oom.find_kill([NOISE, KILLED], 15327, began=5600.0) is None


@pytest.mark.parametrize(
    "text", ["oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "low 0\noom 9\noom_kill 3\n"]
)
def test_the_counter_is_read_of_both_versions_of_cgroups(text: str) -> None:
    assert oom.parse_count(text) == 3
    assert oom.parse_count("") == 0


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("4:memory:/job", "memory/job/memory.oom_control"),
        ("4:cpu,memory:/job", "memory/job/memory.oom_control"),
        ("0::/job", "job/memory.events"),
        ("0::/job", "unified/job/memory.events"),
        ("0::/of/the/host", "memory.events"),
    ],
)
def test_the_counter_is_found_of_both_versions_and_inside_a_container(
    line: str, file: str, tmp_path: Path
) -> None:
    counter = tmp_path / file
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text("oom_kill 0\n")
    assert oom.find_counter(f"9:name=systemd:/\n{line}\n", tmp_path) == counter
    assert oom.find_counter("9:name=systemd:/\n", tmp_path) is None


def watch_of_this_process(folder: Path) -> tuple[oom.OomWatch, int, Path]:
    counter = folder / "memory.events"
    counter.write_text("oom_kill 2\n")
    (folder / "memory").mkdir()
    (folder / "memory" / "memory.oom_control").write_text("oom_kill 2\n")
    watch = oom.OomWatch(folder, folder / "no-kernel-log")
    watch.add(os.getpid())
    found = oom.find_counter(Path("/proc/self/cgroup").read_text(), folder)
    assert found is not None
    return watch, os.getpid(), found


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="cgroups are Linux's")
def test_a_counter_that_has_risen_since_the_start_is_evidence(tmp_path: Path) -> None:
    watch, pid, counter = watch_of_this_process(tmp_path)
    counter.write_text("oom_kill 3\n")
    limit = "max" if counter.name == "memory.events" else "limit_in_bytes"
    (counter.parent / f"memory.{limit}").write_text(f"{512 << 20}\n")
    ended = watch.explain(pid, -signal.SIGKILL)
    assert ended == Ended(EndKind.OOM_KILLER, signal.SIGKILL, detail="memory limit 537 MB")


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="cgroups are Linux's")
def test_without_evidence_nothing_is_claimed_and_other_ends_need_none(tmp_path: Path) -> None:
    watch, pid, _ = watch_of_this_process(tmp_path)
    ended = watch.explain(pid, -signal.SIGKILL)
    assert (ended.kind, ended.detail) == (EndKind.SIGNAL, "no sign of the kernel's OOM killer")
    for status in (-signal.SIGSEGV, 0):
        watch.add(pid)
        assert watch.explain(pid, status) == Ended.from_status(status)


def test_where_nothing_can_be_read_nothing_is_said(tmp_path: Path) -> None:
    watch = oom.OomWatch(tmp_path, tmp_path / "none")
    watch.add(1 << 30)  # no such process
    assert watch.explain(1 << 30, -signal.SIGKILL) == Ended.from_status(-signal.SIGKILL)
