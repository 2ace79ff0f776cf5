"""Where a cell runs again."""

import pytest

from nbdist.client.cells.retries import ranks_again
from nbdist.shared.errors import ClusterError


def test_a_cell_of_all_ranks_runs_again_on_all_that_there_are_now() -> None:
    assert ranks_again((0, 1), of=2, now=(0, 1, 2)) == (0, 1, 2)
    assert ranks_again((0, 1, 2), of=3, now=(0, 1)) == (0, 1)


def test_a_cell_of_some_ranks_runs_again_on_these() -> None:
    assert ranks_again((0, 1), of=3, now=(0, 1, 2, 3)) == (0, 1)


def test_a_cell_is_not_run_again_on_ranks_that_are_gone() -> None:
    with pytest.raises(ClusterError, match="ran on rank 2, and there are 2 ranks now"):
        ranks_again((1, 2), of=4, now=(0, 1))
