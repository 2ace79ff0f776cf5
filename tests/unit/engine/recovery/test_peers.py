"""Whose peer is who, and when a rank waits for what it has sent."""

import pytest

pytest.importorskip("torch")

from nbdist.engine.recovery.peers import must_wait, peer_of


def test_the_peer_is_the_next_rank_and_on_another_host_where_there_are_several() -> None:
    assert [peer_of(rank, 4, 4) for rank in range(4)] == [1, 2, 3, 0]
    assert [peer_of(rank, 4, 2) for rank in range(4)] == [2, 3, 0, 1]
    assert [peer_of(rank, 3, 1) for rank in range(3)] == [1, 2, 0]


def test_a_rank_alone_has_no_peer() -> None:
    assert peer_of(0, 1, 1) is None


def test_a_snapshot_is_whole_at_the_peer_two_steps_before_the_next() -> None:
    assert [steps for steps in range(11, 21) if must_wait(steps, 11, every=10)] == [19, 20]


@pytest.mark.parametrize("every", [1, 2])
def test_where_the_next_one_is_near_it_is_whole_before_the_step_ends(every: int) -> None:
    assert must_wait(7, 7, every)
