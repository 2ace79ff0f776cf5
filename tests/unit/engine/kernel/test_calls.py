"""Everything the notebook may ask of a rank is there, and nothing else is asked."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

import nbdist
from nbdist.engine.kernel.ipython import calls

CLIENT = Path(nbdist.__file__).parent / "client"
ALL = calls.MAIN | calls.ANY_TIME | calls.CELLS


def names_asked_for() -> dict[str, bool]:
    """Return each call's name in the client's source, and whether it is sent as `busy`."""
    asked: dict[str, bool] = {}
    for file in CLIENT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            place = {"ask": 1, "ask_all": 1, "call": 0, "_ask": 0, "_of_layout": 0}.get(
                node.func.attr
            )
            if place is None or len(node.args) <= place:
                continue
            name = node.args[place]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                asked[name.value] = any(keyword.arg == "busy" for keyword in node.keywords)
    return asked


def is_named(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def function_of(place: str) -> ast.FunctionDef:
    """Return the function a place names, read from its source: the module may need torch.

    A method is that of the class of which the module makes the object.
    """
    module, _, name = place.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    body, (*owner, function) = ast.parse(Path(spec.origin).read_text()).body, name.split(".")
    if owner:
        made = [n.value for n in body if isinstance(n, ast.Assign) and is_named(n, owner[0])]
        names = {ast.unparse(call.func) for call in made if isinstance(call, ast.Call)}
        classes = [n for n in body if isinstance(n, ast.ClassDef) and n.name in names]
        body = [statement for one in classes for statement in one.body]
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return node
    raise AssertionError(f"{module} has no function {name}")


@pytest.mark.parametrize("name", ALL)
def test_every_call_names_a_function_that_exists(name: str) -> None:
    assert ast.get_docstring(function_of(ALL[name]))


def test_every_call_of_the_client_is_in_the_table_of_its_channel() -> None:
    asked = names_asked_for()
    assert len(asked) >= 7  # else this test reads the source wrongly
    for name, busy in asked.items():
        assert name in (calls.ANY_TIME if busy else calls.MAIN | calls.CELLS), name


def test_every_call_in_the_table_is_used() -> None:
    assert set(ALL) == set(names_asked_for())


@pytest.mark.parametrize("name", sorted(calls.WITH_BUFFERS))
def test_calls_with_buffers_take_them_first(name: str) -> None:
    first, *_ = [one.arg for one in function_of(ALL[name]).args.args if one.arg != "self"]
    assert first == "buffers"


def test_a_call_resolves_on_its_channel_only() -> None:
    assert inspect.isfunction(calls.resolve("control.stacks", busy=True))
    with pytest.raises(KeyError):
        calls.resolve("control.stacks", busy=False)
    with pytest.raises(KeyError):
        calls.resolve("os.system", busy=True)
