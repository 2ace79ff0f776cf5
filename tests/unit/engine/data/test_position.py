"""What a process knows of the positions of its loaders, from cell to cell."""

from typing import Any

from nbdist.engine.component import EndedCell
from nbdist.engine.data.make import loader
from nbdist.engine.data.position.position import LoaderPosition, Positions
from nbdist.shared.wire import CellStart

START = CellStart(2, (0,), 2)


def position(samples: int = 8) -> LoaderPosition:
    made: Any = loader(list(range(samples)), global_batch=4)
    standing: LoaderPosition = made._standing
    return standing


def test_a_cell_begins_without_the_newest_batch_of_the_one_before() -> None:
    positions, one = Positions(), position()
    assert positions.newest() is None
    positions.gave(one)
    assert positions.newest() is one
    positions.cell_began(START)
    assert positions.newest() is None


def test_what_was_left_for_a_loader_of_this_cell_is_taken_once_by_one_that_fits() -> None:
    positions, saved = Positions(), position()
    saved.consumed = 4
    positions.resume_later(saved.state_dict())
    other, first, second = position(12), position(), position()
    for one in (other, first, second):
        positions.take_pending(one)
    assert [one.consumed for one in (other, first, second)] == [0, 4, 0]


def test_what_no_loader_of_a_cell_has_taken_none_of_the_next_takes() -> None:
    positions, saved, later = Positions(), position(), position()
    saved.consumed = 4
    positions.resume_later(saved.state_dict())
    positions.cell_began(START)
    positions.take_pending(later)
    assert later.consumed == 0


def test_a_loader_is_newer_than_those_that_came_from_another_rank() -> None:
    positions = Positions()
    assert positions.next_number() == 1
    positions.number_after(7)
    assert positions.next_number() == 8
    positions.number_after(3)
    assert positions.next_number() == 9


def test_positions_are_known_in_the_order_of_making_as_long_as_they_live() -> None:
    positions, first, second = Positions(), position(), position()
    positions.add(second)
    positions.add(first)
    assert positions.in_order() == [first, second]
    assert positions.cell_ended(EndedCell(1, "", has_succeeded=True)) == ()
