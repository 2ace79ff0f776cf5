"""A module is adapted when it is imported, whenever that is, and works in every other way."""

import importlib
import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nbdist.engine.compat.libraries import on_import
from nbdist.engine.compat.libraries.on_import import OnImport


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package that nobody has imported, with one function in a module of it."""
    name = "library_of_somebody"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("from .part import what as imported_by_name\n")
    (tmp_path / name / "part.py").write_text("def what():\n    return 'native'\n")
    monkeypatch.syspath_prepend(tmp_path)
    others = [finder for finder in sys.meta_path if not isinstance(finder, OnImport)]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.setattr(on_import, "here", OnImport())
    for module in (name, f"{name}.part"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))  # so that it is put back
        monkeypatch.delitem(sys.modules, module)
    return name


def ours(module: ModuleType) -> None:
    module.what = lambda: "ours"  # type: ignore[attr-defined]


def test_a_module_is_adapted_before_anybody_takes_names_from_it(library: str) -> None:
    on_import.here.adapt(f"{library}.part", ours)
    assert library not in sys.modules, "it loads nothing by itself"
    assert importlib.import_module(library).imported_by_name() == "ours"


def test_a_module_that_is_imported_already_is_adapted_at_once(library: str) -> None:
    part = importlib.import_module(f"{library}.part")
    on_import.here.adapt(f"{library}.part", ours)
    assert part.what() == "ours"


def test_a_second_wish_for_the_same_module_changes_nothing(library: str) -> None:
    calls: list[str] = []
    for _ in range(2):
        on_import.here.adapt(f"{library}.part", lambda module: calls.append(module.__name__))
    importlib.import_module(library)
    assert calls == [f"{library}.part"]
    assert sum(isinstance(finder, OnImport) for finder in sys.meta_path) == 1


def test_its_source_can_be_read_as_before(library: str) -> None:
    on_import.here.adapt(f"{library}.part", lambda module: None)
    part = importlib.import_module(f"{library}.part")
    assert "return 'native'" in inspect.getsource(part.what)


def test_what_fails_is_logged_and_the_import_goes_on(
    library: str, caplog: pytest.LogCaptureFixture
) -> None:
    on_import.here.adapt(f"{library}.part", lambda module: module.gone)
    with caplog.at_level(logging.ERROR, "nbdist.on_import"):
        assert importlib.import_module(library).imported_by_name() == "native"
    assert f"{library}.part could not be adapted and stays as it is" in caplog.text


def test_a_module_that_is_not_there_is_missing_as_before(library: str) -> None:
    on_import.here.adapt("nobody_has_written_this", ours)
    with pytest.raises(ModuleNotFoundError, match="nobody_has_written_this"):
        importlib.import_module("nobody_has_written_this")
