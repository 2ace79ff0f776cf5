"""The layouts that a process knows, made there or got from another rank."""

from typing import Any

from nbdist.engine.layout.layout import Layouts


class Numbered:
    """Stands for a layout."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_layouts_are_known_in_the_order_of_making_as_long_as_they_live() -> None:
    layouts = Layouts()
    assert (layouts.newest(), layouts.in_order()) == (None, [])
    second: Any = Numbered(1)
    first: Any = Numbered(0)
    for one in (second, first):
        layouts.add(one)
    assert layouts.in_order() == [first, second]
    assert layouts.newest() is second
    del one, second
    assert layouts.newest() is first


def test_a_layout_is_newer_than_one_that_came_from_another_rank() -> None:
    layouts = Layouts()
    assert layouts.next_number() == 0
    layouts.number_after(4)
    assert layouts.next_number() == 5
    layouts.number_after(1)
    assert layouts.next_number() == 6
