"""Which ranks hold the same part of a tensor."""

import pytest

torch = pytest.importorskip("torch")

from nbdist.engine.compat.torch_shards import check, same_place  # noqa: E402

SQUARE = torch.tensor([[0, 1], [2, 3]])


def test_what_is_replicated_over_a_dim_lies_on_all_ranks_along_it() -> None:
    assert same_place(SQUARE, (True, False), 1) == {1, 3}
    assert same_place(SQUARE, (False, True), 1) == {0, 1}
    assert same_place(SQUARE, (True, True), 2) == {0, 1, 2, 3}
    assert same_place(SQUARE, (False, False), 2) == {2}


def test_a_rank_outside_of_the_mesh_holds_no_part() -> None:
    assert same_place(SQUARE, (True, True), 4) == frozenset()


def test_this_torch_has_what_is_used_of_it() -> None:
    assert check() == []
