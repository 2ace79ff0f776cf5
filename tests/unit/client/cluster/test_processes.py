"""Which ranks live, and how the end of a process is told."""

import pytest

from nbdist.client.cluster.launchers.base import Started
from nbdist.client.cluster.processes import Processes, describe_end
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
    assert describe_end(status, evidence) == told


def test_a_rank_that_ends_is_dead_with_its_cause() -> None:
    roster = Processes()
    roster.expect([0, 1])
    for rank in (0, 1):
        roster.came(rank, Started(100 + rank, host="here"))
    assert roster.ended(1, -9, "killed by SIGKILL")
    assert (roster.living(), roster.dead()) == ([0], [1])
    assert roster.ranks[1].cause == "killed by SIGKILL"


def test_a_process_that_ends_before_its_pid_is_known_comes_dead() -> None:
    roster = Processes()
    roster.expect([0])
    assert not roster.ended(0, 1, "exit code 1")
    roster.came(0, Started(100, host="here"))
    assert roster.dead() == [0]


def test_the_end_of_an_earlier_start_says_nothing_of_the_next() -> None:
    roster = Processes()
    roster.expect([0])
    roster.ended(0, 1, "exit code 1")
    roster.expect([0])
    roster.came(0, Started(101, host="here"))
    assert roster.living() == [0]
