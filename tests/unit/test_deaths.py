"""How the end of a process is told."""

import pytest

from nbdist.client import cluster
from nbdist.host import oom


@pytest.mark.parametrize(
    ("status", "evidence", "told"),
    [
        (3, "", "exit code 3"),
        (-11, "", "killed by SIGSEGV"),
        (-9, "no sign of the kernel's OOM killer", "killed by SIGKILL"),
        (-9, f"{oom.KILLER} (memory limit 512 MiB)", f"{oom.KILLER} (memory limit 512 MiB)"),
    ],
)
def test_a_death_is_told_by_its_cause_alone(status: int, evidence: str, told: str) -> None:
    assert cluster.describe_end(status, evidence) == told
