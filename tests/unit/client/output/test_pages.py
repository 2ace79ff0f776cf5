"""The parts of ipykernel that answer a page while a cell runs; their use is a lifecycle test."""

from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
from ipykernel.subshell_manager import SubshellManager

from nbdist.client.output import pages


def test_the_installed_ipykernel_has_what_is_used_of_it() -> None:
    assert pages.check() == []


def test_what_is_gone_from_ipykernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SubshellManager, "_create_subshell")

    [line] = pages.check()

    assert line.endswith(": SubshellManager._create_subshell is gone")


def test_a_kernel_of_ipykernel_6_lacks_nothing_and_lets_pages_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ipykernel._version.__version__", "6.31.0")
    monkeypatch.delattr(SubshellManager, "_create_subshell")
    assert pages.check() == []


def test_a_plain_script_has_no_pages() -> None:
    assert pages.here.get() is None


class Events:
    """Stands where IPython's events stand."""

    def __init__(self) -> None:
        self.called: list[Callable[[], None]] = []

    def register(self, event: str, call: Callable[[], None]) -> None:
        """Call it when a cell begins."""
        self.called.append(call)

    def unregister(self, event: str, call: Callable[[], None]) -> None:
        """Call it no more."""
        self.called.remove(call)

    def begin_cell(self) -> None:
        """Tell that a cell begins."""
        for call in list(self.called):
            call()


def test_of_a_cell_in_parts_the_next_cell_shows_once_what_the_last_part_left() -> None:
    events, shown = Events(), list[str]()
    of_kernel = pages.Pages(MagicMock(), events)
    of_kernel.begin(continues=False)
    of_kernel.opened = True  # a page is opened in the first part
    of_kernel.end(continues=True)
    of_kernel.begin(continues=False)
    assert of_kernel.opened
    of_kernel.show_next(lambda: shown.append("the first part"))
    of_kernel.show_next(lambda: shown.append("both parts"))

    events.begin_cell()
    events.begin_cell()

    assert shown == ["both parts"]
    assert not of_kernel.opened
