"""The parts of ipykernel that answer a page while a cell runs; their use is a lifecycle test."""

import pytest
from ipykernel.subshell_manager import SubshellManager

from nbdist.client.output import pages


def test_the_installed_ipykernel_has_what_is_used_of_it() -> None:
    assert pages.check() == []


def test_what_is_gone_from_ipykernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SubshellManager, "_create_subshell")

    [line] = pages.check()

    assert line.endswith(": SubshellManager._create_subshell is gone")


def test_a_plain_script_has_no_pages() -> None:
    assert pages.pages() is None
