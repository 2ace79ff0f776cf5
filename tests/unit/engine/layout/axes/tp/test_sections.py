"""Weights that pack projections: which rows a rank keeps, computes with, and sends."""

import pytest
import torch

from nbdist.engine.layout.axes.tp.sections import Sections, equal, one


def test_a_part_is_the_same_part_of_each_section() -> None:
    packed = Sections(0, (8, 4, 4))
    assert packed.rows(2, 0) == [range(4), range(8, 10), range(12, 14)]
    assert packed.rows(2, 1) == [range(4, 8), range(10, 12), range(14, 16)]


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (4, 4, 4), (8, 4, 4), (4, 8), (8, 8, 8, 8)])
@pytest.mark.parametrize("parts", [2, 4])
def test_what_shards_send_is_in_the_order_in_which_a_part_has_it(
    sizes: tuple[int, ...], parts: int
) -> None:
    cut = Sections(0, sizes)
    whole = torch.arange(cut.size)
    shards = whole.chunk(parts)
    for part in range(parts):
        sent = [
            shard[rows.start : rows.stop]
            for other, shard in enumerate(shards)
            for rows in cut.routes(parts, other)[part]
        ]
        assert torch.equal(torch.cat(sent), cut.take(whole, parts, part))


def test_parts_hold_everything_once() -> None:
    cut = Sections(1, (8, 4, 4))
    whole = torch.arange(32).view(2, 16)
    found = torch.cat([cut.take(whole, 4, part) for part in range(4)], 1)
    assert sorted(found.flatten().tolist()) == list(range(32))


def test_of_one_section_a_part_is_a_view_and_nothing_is_sent() -> None:
    whole = torch.zeros(8, 3)
    assert one(0, 8).take(whole, 2, 1).data_ptr() == whole[4:].data_ptr()
    assert one(0, 8).leaving(2, 0) == 0


def test_of_two_projections_half_a_shard_is_sent_and_of_three_two_thirds_or_none() -> None:
    assert [equal(0, 8, 2).leaving(2, part) for part in (0, 1)] == [2, 2]
    assert [equal(0, 12, 3).leaving(2, part) for part in (0, 1)] == [2, 2]


def test_a_size_that_cannot_be_divided_leaves_the_rest_in_the_last_section() -> None:
    assert equal(0, 9, 2) == Sections(0, (4, 5))
