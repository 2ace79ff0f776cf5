"""A rank that the kernel's OOM killer ends, in a real memory cgroup of its own."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.host.oom import CGROUPS, find_counter
from tests.lifecycle.kernels import Notebook, wait_for

_LIMIT_BYTES = 256 << 20  # what a rank had before it was moved stays charged where it was


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup with a limit, below this process's own."""
    counter = None
    with contextlib.suppress(OSError):
        counter = find_counter(Path("/proc/self/cgroup").read_text(), CGROUPS)
    if counter is None:
        pytest.skip("this machine has no memory cgroups that could be read")
    limit, swap = ("memory.max", "memory.swap.max")
    if counter.name == "memory.oom_control":
        limit, swap = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    folder = counter.parent / f"nbdist-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(_LIMIT_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"this user may not limit the memory of a cgroup: {error}")
    with contextlib.suppress(OSError):  # a machine without swap need not limit it
        (folder / swap).write_text("0" if swap == "memory.swap.max" else str(_LIMIT_BYTES))
    yield folder
    wait_for(lambda: not (folder / "cgroup.procs").read_text(), "the cgroup to be empty")
    folder.rmdir()


def test_a_rank_that_the_kernel_ended_for_memory_is_told_from_one_that_was_killed(
    cgroup: Path, tmp_path: Path
) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.start()
        pids = notebook.pids()
        (cgroup / "cgroup.procs").write_text(str(pids["rank 1"]))
        said = notebook.on_ranks(
            "if rank == 1:\n    hog = [bytearray(1 << 24) for _ in range(64)]\ndist.barrier()"
        )
        assert "rank 1 (localhost, cpu) died: killed by the kernel's OOM killer" in said, said
        os.kill(pids["rank 0"], signal.SIGKILL)
        wait_for(lambda: "rank 0" not in notebook.pids(), "the kernel to hear of it")
        said = notebook.run("%dist status")
        assert "killed by SIGKILL" in said
        assert "OOM" not in said
