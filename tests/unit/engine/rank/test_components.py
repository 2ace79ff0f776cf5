"""The components of a rank are called in order as a cell begins, and in reverse as it ends."""

from collections.abc import Iterable

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.rank import components
from nbdist.engine.rank.virtual_device import VirtualDevice
from nbdist.shared.wire import CellStart

START = CellStart(3, (0, 1), 3)
ENDED = EndedCell(3, "pass", has_succeeded=True)


class Noted(Component):
    """Notes in one list when it is called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def cell_began(self, start: CellStart) -> None:
        self._calls.append(f"{self._name} begins {start.number}")

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        self._calls.append(f"{self._name} ends {cell.number}")
        return [f"said by {self._name}"]


def test_what_began_last_ends_first_and_speaks_first() -> None:
    calls: list[str] = []
    parts = [Noted("outer", calls), Noted("inner", calls)]
    components.begin(parts, START)
    said = list(components.end(parts, ENDED))
    assert calls == ["outer begins 3", "inner begins 3", "inner ends 3", "outer ends 3"]
    assert said == ["said by inner", "said by outer"]


def test_a_component_does_nothing_by_itself() -> None:
    part = Component()
    part.cell_began(START)
    assert list(part.cell_ended(ENDED)) == []


def test_the_components_of_a_script_end_a_cell_that_did_nothing_without_a_word() -> None:
    virtual = VirtualDevice(None, lambda: 0, None)
    parts = components.of_script(virtual)
    components.begin(parts, CellStart(1, (0,), 1))
    assert list(components.end(parts, EndedCell(1, "", has_succeeded=True))) == []
