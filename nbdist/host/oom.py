"""Tell whether the kernel's out-of-memory killer ended a process: evidence, or no claim.

Two witnesses, read at the death of a process that got SIGKILL:

- the kernel's log (`/dev/kmsg`), where it may be read: it names the process by its number. A
  container has numbers of its own, and finds none of its processes there;
- the counter of the process's memory cgroup (`oom_kill`), which says that one of the processes in
  it was ended. Only a rise of the last seconds counts: a DataLoader's worker that died of it last
  hour says nothing of a rank that somebody kills now.

Sources: Linux, mm/oom_kill.c (`__oom_kill_process`), Documentation/admin-guide/cgroup-v2.rst,
Documentation/ABI/testing/dev-kmsg.
"""

import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nbdist.shared.processes.ended import Ended, EndKind
from nbdist.shared.text import name_bytes

_RECENT_S = 10.0  # a process that held much takes seconds to be gone
_MOST_LINES = 50_000  # of the kernel's log; it keeps a few thousand
_KILLED = re.compile(r"Killed process (\d+) .*?(?:anon-rss:(\d+)kB|$)")

CGROUPS = Path("/sys/fs/cgroup")


class OomWatch:
    """The children whose end may have to be explained. One thread."""

    def __init__(self, cgroups: Path = CGROUPS, kernel_log: Path = Path("/dev/kmsg")) -> None:
        self._cgroups = cgroups
        self._kernel_log = kernel_log
        self._began: dict[int, float] = {}
        self._counters: dict[int, Path] = {}
        self._counts: dict[Path, int] = {}
        self._rose: dict[Path, float] = {}

    def add(self, pid: int) -> None:
        """Begin to watch a process that has just been started."""
        self._began[pid] = time.monotonic()
        self.refresh()

    def refresh(self) -> None:
        """Read the counters; called about once a second."""
        for pid in self._began:
            # Read each time: a batch system moves processes that have been started.
            with suppress(OSError):
                text = Path(f"/proc/{pid}/cgroup").read_text()
                if counter := find_counter(text, self._cgroups):
                    self._counters[pid] = counter
        for path in set(self._counters.values()):
            count = _read_count(path)
            if count > self._counts.get(path, count):
                self._rose[path] = time.monotonic()
            self._counts[path] = count

    def explain(self, pid: int, status: int) -> Ended:
        """Return how a process has ended, with what is known of an end by SIGKILL.

        Args:
            pid: A process that was added. It is forgotten.
            status: Its exit code, or minus the signal's number.
        """
        self.refresh()
        began, counter = self._began.pop(pid, 0.0), self._counters.pop(pid, None)
        ended = Ended.from_status(status)
        if status != -signal.SIGKILL:
            return ended
        log = _read_kernel_log(self._kernel_log)
        if log is not None and (killed := find_kill(log, pid, began)):
            return killed
        if counter in self._rose and time.monotonic() - self._rose[counter] < _RECENT_S:
            return _killed(_describe_limit(counter))
        if log is None and counter is None:
            return ended
        return replace(ended, detail="no sign of the kernel's OOM killer")


def find_kill(records: Iterable[str], pid: int, began: float) -> Ended | None:
    """Return how the kernel's log tells the end of a process; None when it does not.

    Args:
        records: `/dev/kmsg`'s: priority, number, microseconds since the boot, flags; then the text.
        pid: The process.
        began: When it was started (`time.monotonic`): numbers of processes are used again.
    """
    for record in records:
        head, _, text = record.partition(";")
        found = _KILLED.search(text)
        if found is None or int(found[1]) != pid:
            continue
        fields = head.split(",")
        # The clock of the kernel's log is close to the monotonic one, and not quite the same.
        if len(fields) > 2 and fields[2].isdigit() and int(fields[2]) / 1e6 < began - 2.0:
            continue
        return _killed(f"it held {name_bytes(int(found[2]) * 1024)}" if found[2] else "")
    return None


def find_counter(text: str, cgroups: Path = CGROUPS) -> Path | None:
    """Return the file that counts the OOM kills of a process's memory cgroup, if there is one.

    Args:
        text: The process's `/proc/PID/cgroup`: a line each of number, controllers and path.
        cgroups: Where the cgroups are mounted.
    """
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        path = path.strip("/")
        if "memory" in controllers.split(","):
            tops, name = [cgroups / "memory"], "memory.oom_control"
        elif number == "0":
            tops, name = [cgroups, cgroups / "unified"], "memory.events"
        else:
            continue
        for top in tops:
            # In a container the mount may begin at its own cgroup, whatever the path says.
            for counter in (top / path / name, top / name):
                if counter.is_file():
                    return counter
    return None


def parse_count(text: str) -> int:
    """Return `oom_kill` of a `memory.events` (cgroup v2) or `memory.oom_control` (v1)."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return 0


def _killed(detail: str) -> Ended:
    return Ended(EndKind.OOM_KILLER, signal.SIGKILL, detail=detail)


def _describe_limit(counter: Path) -> str:
    """Return the limit of the cgroup that has this counter, where it has one."""
    name = "memory.max" if counter.name == "memory.events" else "memory.limit_in_bytes"
    try:
        text = (counter.parent / name).read_text().strip()
    except OSError:
        return ""
    # "max", and in version 1 a number near 2**63, are no limit.
    limited = text.isdigit() and int(text) < 1 << 60
    return f"memory limit {name_bytes(int(text))}" if limited else ""


def _read_count(path: Path) -> int:
    try:
        return parse_count(path.read_text())
    except OSError:
        return 0  # the cgroup is gone, and with it what it knew


def _read_kernel_log(path: Path) -> list[str] | None:
    """Return the records of the kernel's log, or None where it may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    records: list[str] = []
    try:
        while len(records) < _MOST_LINES:
            try:
                record = os.read(fd, 8192)  # one record a read
            except BrokenPipeError:
                continue  # records were overwritten while we read: go on with the oldest there is
            except BlockingIOError:
                break  # the newest has been read
            if not record:
                break
            records.append(record.decode(errors="replace"))
    except OSError:
        return None
    finally:
        os.close(fd)
    return records
