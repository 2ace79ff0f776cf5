"""A namespace travels whole: what is shared stays shared, and one bad object stops nothing."""

import dataclasses
import functools
import gc
import socket
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbdist.engine.kernel.placeholder import Placeholder, PlaceholderError
from nbdist.engine.recovery.clone import pickler, unpickler


def clone(
    cell: str, *, more: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run a cell, send its names to a second namespace, and return that with the placeholders."""
    here: dict[str, Any] = {"__name__": "__main__", **(more or {})}
    exec(cell, here)
    there: dict[str, Any] = {"__name__": "__main__", "rank": 1}
    sent = {name: value for name, value in here.items() if not name.startswith("__")}
    refused: dict[int, str] = {}
    for _ in range(3):
        parcel = pickler.dump(sent, {id(here): "globals"}, (), user_globals=here, refused=refused)
        buffers = [bytearray(buffer) for buffer in parcel.buffers]
        loaded = unpickler.load(parcel.names, parcel.streams, buffers, {"globals": there}, there)
        failures = loaded.failures
        if not failures:
            there.update(loaded.values)
            return there, parcel.placeholders
        refused.update({id(parcel.objects[f.serial]): f.why for f in failures})
    raise AssertionError(failures)


def test_what_names_share_they_share_afterwards() -> None:
    there, placeholders = clone("a = [1]; b = {'a': a}; a.append(b); c = (a, b)")

    assert placeholders == {}
    assert there["b"]["a"] is there["a"]
    assert there["a"][1] is there["b"]
    assert there["c"][0] is there["a"]


def test_a_function_made_in_a_cell_sees_the_namespace_it_has_come_to() -> None:
    there, _ = clone("rank = 0\ndef who(): return rank\nnow = globals()")
    there["rank"] = 7

    assert there["who"]() == 7
    assert there["now"] is there


def test_functions_keep_defaults_closures_attributes_and_recursion() -> None:
    there, placeholders = clone(
        """
def counter(start: int = 3, *, by=1):
    'Count.'
    n = start
    def up():
        nonlocal n
        n += by
        return n
    def now(): return n
    return up, now
counter.note = 'mine'
up, now = counter()
up()
fib = lambda n: n if n < 2 else fib(n - 1) + fib(n - 2)
def outer():
    def walk(n): return 0 if n == 0 else 1 + walk(n - 1)
    return walk
walk = outer()
"""
    )

    assert placeholders == {}
    assert (there["up"](), there["now"]()) == (5, 5)
    assert (there["fib"](10), there["walk"](4)) == (55, 4)
    assert (there["counter"].__doc__, there["counter"].note) == ("Count.", "mine")
    assert there["counter"].__annotations__ == {"start": int}


def test_classes_made_in_a_cell_travel_by_value_and_once() -> None:
    there, placeholders = clone(
        """
import dataclasses, enum
class Base:
    def name(self): return 'base'
class Child(Base):
    __slots__ = ('x',)
    def __init__(self, x): self.x = x
    def name(self): return super().name() + '!' + str(self.x)
@dataclasses.dataclass(frozen=True)
class Point: x: int; y: int = 2
class Colour(enum.Enum): RED = 1
child, point, red = Child(4), Point(1), Colour.RED
def make(): return Child(9)
"""
    )

    assert placeholders == {}
    assert there["child"].name() == "base!4"
    assert type(there["child"]) is there["Child"] is type(there["make"]())
    assert isinstance(there["child"], there["Base"])
    assert there["point"] == there["Point"](1)
    assert there["red"] is there["Colour"].RED


@pytest.mark.parametrize(
    ("cell", "what"),
    [
        ("import threading; bad = threading.Lock()", "threading.Lock"),
        ("import threading; bad = threading.RLock()", "threading.RLock"),
        ("bad = (i for i in range(3))", "generator"),
        ("import socket; bad = socket.socket(); bad.close()", "socket"),
        ("import sys; bad = sys._getframe()", "frame"),
    ],
)
def test_what_cannot_travel_is_a_placeholder_with_a_name_and_stops_nothing_else(
    cell: str, what: str
) -> None:
    there, placeholders = clone(f"{cell}\ngood = [1]\nholder = {{'deep': [bad], 'good': good}}")

    assert there["good"] is there["holder"]["good"]
    assert list(placeholders) == ["bad"]
    assert placeholders["bad"].startswith(f"{what}: ")
    assert there["holder"]["deep"][0] is there["bad"]
    assert f"<placeholder for {what}:" in repr(there["bad"])


def test_an_open_file_is_a_placeholder_also_as_an_attribute_of_what_travels() -> None:
    with open("/dev/null") as text, open("/dev/null", "wb") as raw:
        there, placeholders = clone(
            """
class Log:
    def __init__(self, file): self.file, self.lines = file, ['a']
log = Log(raw)
""",
            more={"text": text, "raw": raw},
        )

    assert list(placeholders) == ["text", "raw"]
    assert placeholders["text"] == "open file: an open file belongs to its process"
    assert there["log"].lines == ["a"]
    assert there["log"].file is there["raw"]


def test_every_use_of_a_placeholder_says_what_it_stands_for() -> None:
    lock: Any = Placeholder("threading.Lock", "cannot pickle")
    for use in (
        lambda: lock.acquire(),
        lambda: lock(),
        lambda: lock + 1,
        lambda: bool(lock),
        lambda: list(lock),
        lambda: lock[0],
        lambda: setattr(lock, "x", 1),
        lambda: lock // 2,
        lambda: 2**lock,
        lambda: 1 | lock,
        lambda: abs(lock),
        lambda: round(lock),
        lambda: divmod(lock, 2),
    ):
        with pytest.raises(PlaceholderError, match=r"placeholder for threading\.Lock"):
            use()
    with pytest.raises(PlaceholderError), lock:
        pass
    assert not hasattr(lock, "_repr_html_")


def test_an_attribute_that_cannot_travel_leaves_the_rest_of_its_object() -> None:
    there, placeholders = clone(
        """
import threading
class Guarded:
    def __init__(self): self.lock, self.lines = threading.Lock(), ['a']
deep = [{'x': Guarded()}]
"""
    )

    assert there["deep"][0]["x"].lines == ["a"]
    assert type(there["deep"][0]["x"].lock) is Placeholder
    assert placeholders["deep"].startswith("list, with placeholders for threading.Lock: ")


def test_what_pickles_but_cannot_be_built_is_a_placeholder_too() -> None:
    there, placeholders = clone(
        """
class Picky(Exception):
    def __init__(self, a, b): super().__init__('one')
class Fragile:
    def __init__(self): self.x = 1
    def __setstate__(self, state): raise ValueError('not here')
picky, parts = Picky(1, 2), [Fragile(), 5]
"""
    )

    assert type(there["picky"]) is Placeholder
    assert type(there["parts"][0]) is Placeholder
    assert there["parts"][1] == 5
    assert "ValueError: not here" in placeholders["parts"]


def test_a_class_that_the_other_side_cannot_import_is_a_placeholder() -> None:
    module: Any = types.ModuleType("only_here")
    sys.modules["only_here"] = module
    exec("class Thing: pass", vars(module))
    try:
        here = {"thing": module.Thing(), "good": 1}
        parcel = pickler.dump(here, {}, (), user_globals=here)
        del sys.modules["only_here"]
        loaded = unpickler.load(parcel.names, parcel.streams, [], {}, {})
    finally:
        sys.modules.pop("only_here", None)

    assert loaded.values["good"] == 1
    assert "only_here" in loaded.failures[0].why
    assert list(pickler.names_of(parcel, loaded.failures)) == ["thing"]


def test_large_arrays_travel_out_of_band_and_are_writable() -> None:
    array = np.arange(100_000, dtype=np.float64)
    here: dict[str, Any] = {"x": array, "y": {"again": array}}
    parcel = pickler.dump(here, {}, (), user_globals=here)

    buffers = [bytearray(buffer) for buffer in parcel.buffers]
    values = unpickler.load(parcel.names, parcel.streams, buffers, {}, {}).values

    assert sum(map(len, parcel.streams)) < 1000
    assert values["x"] is values["y"]["again"]
    values["x"][0] = 5
    assert np.array_equal(values["x"][1:], array[1:])


def test_common_containers_and_library_objects_travel() -> None:
    more = {
        "counts": defaultdict(list, a=[1]),
        "recent": deque([1, 2], maxlen=2),
        "ordered": OrderedDict(a=1),
        "path": Path("/tmp"),
        "half": functools.partial(int, base=2),
        "module": threading,
        "method": "abc".upper,
    }
    there, placeholders = clone("", more=more)

    assert placeholders == {}
    assert there["half"]("11") == 3
    assert there["method"]() == "ABC"
    assert there["recent"].maxlen == 2
    assert {k: there[k] for k in ("counts", "ordered", "path", "module")} == {
        k: more[k] for k in ("counts", "ordered", "path", "module")
    }


def test_a_chain_of_a_thousand_objects_travels_and_a_bottomless_one_is_a_placeholder() -> None:
    there, placeholders = clone(
        """
class Link:
    def __init__(self, after): self.after = after
chain = None
for _ in range(1000): chain = Link(chain)
endless = []
for _ in range(60_000): endless = [endless]
after = 1
"""
    )

    assert "endless" in placeholders
    assert "chain" not in placeholders
    assert there["after"] == 1


def test_what_the_other_process_lacks_is_named() -> None:
    group = object()
    here = {"group": group, "holder": [group], "good": 1}
    parcel = pickler.dump(here, {id(group): "process group 7"}, (), user_globals=here)

    loaded = unpickler.load(parcel.names, parcel.streams, [], {}, {})

    assert list(loaded.missing) == ["group", "holder"]
    assert loaded.missing["group"] == "process group 7: this process has none"
    assert type(loaded.values["group"]) is Placeholder


def test_nothing_private_has_moved() -> None:
    assert pickler.check() == []


def test_weak_references_hold_what_travels_with_them() -> None:
    @dataclasses.dataclass(eq=False)
    class Node:
        name: str

    node = Node("a")
    _, placeholders = clone("", more={"node": node, "ref": weakref.ref(node), "s": socket.AF_INET})

    assert list(placeholders) == ["ref"]  # without the recipe for it


def test_an_object_that_would_fail_at_its_end_without_its_parts_is_a_placeholder_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    there, placeholders = clone(
        """
import subprocess, sys, tempfile
child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
child.communicate()
kept = tempfile.NamedTemporaryFile()
class Plain:
    def __init__(self): self.parts = [1]
    def __del__(self): self.parts.append(2)
plain = Plain()
"""
    )
    assert type(there["child"]) is Placeholder
    assert placeholders["child"].startswith("subprocess.Popen: ")
    assert there["plain"].parts == [1]
    there.clear()
    gc.collect()
    assert ignored == []


def test_a_placeholder_that_travels_on_is_told_again_with_its_reason() -> None:
    standing = Placeholder("threading.Lock", "cannot pickle it")
    there, placeholders = clone("held = {'lock': lock}", more={"lock": standing})
    assert placeholders["lock"] == "threading.Lock: cannot pickle it"
    assert type(there["lock"]) is Placeholder
