"""Which ranks live, and how the others ended."""

import json
from dataclasses import asdict

from nbdist.client.cluster.processes import Processes, Started
from nbdist.shared.processes.ended import Ended

KILLED = Ended.from_status(-9)


def test_a_rank_that_ends_is_dead_and_keeps_how() -> None:
    roster = Processes()
    roster.expect([0, 1])
    for rank in (0, 1):
        roster.came(rank, Started(100 + rank, host="here"))
    assert roster.end(1, KILLED) == KILLED
    assert (roster.living(), roster.dead()) == ([0], [1])
    assert roster.ranks[1].ended == KILLED


def test_why_nbdist_killed_a_rank_is_part_of_its_end() -> None:
    roster = Processes()
    roster.came(0, Started(100, host="here"))
    roster.ranks[0].killed_for = "it did not stop"
    assert str(roster.end(0, KILLED)) == "killed by SIGKILL, because it did not stop"


def test_a_process_that_ends_before_its_pid_is_known_comes_dead() -> None:
    roster = Processes()
    roster.expect([0])
    assert roster.end(0, Ended.from_status(1)) is None
    roster.came(0, Started(100, host="here"))
    assert roster.dead() == [0]


def test_the_end_of_an_earlier_start_says_nothing_of_the_next() -> None:
    roster = Processes()
    roster.expect([0])
    roster.end(0, Ended.from_status(1))
    roster.expect([0])
    roster.came(0, Started(101, host="here"))
    assert roster.living() == [0]


def test_another_kernel_knows_the_same_ranks_and_ends() -> None:
    roster, other = Processes(), Processes()
    for rank in (0, 1):
        roster.came(rank, Started(100 + rank, host="here"))
    roster.end(1, KILLED)
    other.adopt(json.loads(json.dumps([asdict(state) for state in roster.ranks.values()])))
    assert other.ranks == roster.ranks
