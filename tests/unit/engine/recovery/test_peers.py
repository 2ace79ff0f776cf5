"""When a rank waits for what it has sent."""

import pytest

pytest.importorskip("torch")

from nbdist.engine.recovery.snapshots.peers import must_wait


def test_a_snapshot_is_whole_at_the_peer_two_steps_before_the_next() -> None:
    assert [steps for steps in range(11, 21) if must_wait(steps, 11, every=10)] == [19, 20]


@pytest.mark.parametrize("every", [1, 2])
def test_where_the_next_one_is_near_it_is_whole_before_the_step_ends(every: int) -> None:
    assert must_wait(7, 7, every)
