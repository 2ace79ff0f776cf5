"""From whom new ranks get the random numbers that they must draw the same."""

import pytest

pytest.importorskip("torch")

from nbdist.engine.recovery.alike_random import choose


def test_a_living_neighbour_tells_and_so_does_one_whose_stream_a_peer_had_kept() -> None:
    assert choose([1, 2], own=(), same_samples=2) == {1: (0, 0), 2: (2, 3)}
    assert choose([2, 3], own=(3,), same_samples=2) == {2: (2, 3)}


def test_where_all_neighbours_died_they_begin_one_stream_together() -> None:
    assert choose([0, 1], own=(), same_samples=2) == {0: (0, None), 1: (0, None)}
