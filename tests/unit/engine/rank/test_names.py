"""Names are looked up for Tab and Shift+Tab, and nothing of the user's runs."""

import types
from typing import Any

import pytest

from nbdist.engine.rank.names import describe_in, members_of


class Trap:
    """Everything in it raises."""

    kept = 1

    def __init__(self) -> None:
        self.own = {"a": 1}

    @property
    def computed(self) -> int:
        raise AssertionError("a property ran")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    def __dir__(self) -> list[str]:
        raise AssertionError("__dir__ ran")

    def __repr__(self) -> str:
        raise AssertionError("__repr__ ran")

    def method(self, size: int, *, fast: bool = True) -> None:
        """Do it."""


class Module:
    """Keeps attributes as torch.nn.Module does."""

    def __init__(self) -> None:
        self._modules = {"layer": Trap()}

    def forward(self, x: int) -> int:
        return x


NAMES = {"trap": Trap(), "model": Module(), "types": types, "n": 3}


def test_names_of_cells_have_kinds() -> None:
    kinds = {"trap": "instance", "model": "instance", "types": "module", "n": "instance"}
    assert members_of("", NAMES) == kinds


def test_members_are_read_without_running_anything() -> None:
    found = members_of("trap", NAMES)
    assert (found["kept"], found["own"], found["method"]) == ("instance", "instance", "function")
    assert found["computed"] == "property"
    assert members_of("model.layer", NAMES) == found
    assert "items" in members_of("trap.own", NAMES)


@pytest.mark.parametrize("path", ["trap.computed", "trap.computed.x", "trap.gone", "nothing.at"])
def test_what_would_have_to_run_has_no_members(path: str) -> None:
    assert members_of(path, NAMES) == {}


def test_a_module_has_the_names_that_it_tells_and_none_is_imported() -> None:
    lazy = types.ModuleType("lazy")
    names = {"__dir__": lambda: ["here", "later"], "here": len, "inner": types}
    vars(lazy).update(names, __getattr__=Trap.__getattr__)
    assert members_of("lazy", {"lazy": lazy}) == {"here": "function", "later": "property"}


def test_a_call_is_described_by_signature_and_docstring() -> None:
    text = describe_in("trap.method", NAMES)
    assert "trap.method(size: int, *, fast: bool = True)" in text
    assert "Do it." in text
    assert "model(x: int) -> int" in describe_in("model", NAMES)


def test_a_value_is_described_without_its_repr() -> None:
    assert "Trap, on rank 0" in describe_in("trap", NAMES)
    assert "3" in describe_in("n", NAMES)
    assert describe_in("gone", NAMES) == ""
