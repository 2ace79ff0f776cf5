"""Push and pull between this process and two real ranks."""

import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

from nbdist import Session, TransferError, UsageError


def there_and_back(session: Session, value: Any) -> list[Any]:
    session.push({"sent": value})
    return session.pull("sent")


def test_numbers_text_and_containers(session: Session) -> None:
    value = {"a": [1, 2.5, None], "b": ("x", {3}), "c": b"bytes", 4: "four"}
    assert there_and_back(session, value) == [value, value]


def test_several_names_at_once_and_some_ranks_only(session: Session) -> None:
    session.run("only = 'old'")
    session.push({"one": 1, "two": 2})
    session.push({"only": "new"}, ranks="1")
    assert session.run("[one, two, only]").value_list == [[1, 2, "old"], [1, 2, "new"]]
    assert session.pull("only", ranks="1") == ["new"]


def test_numpy_arrays_arrive_equal_and_writable(session: Session) -> None:
    for array in (
        numpy.arange(200_000, dtype="float32").reshape(400, 500),
        numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
        numpy.arange(10)[::2],
        numpy.zeros((0, 3)),
        numpy.array(5.0),
    ):
        for got in there_and_back(session, array):
            assert numpy.array_equal(got, array)
            assert got.dtype == array.dtype
            got[...] = 0


def test_pushed_arrays_are_writable_on_the_ranks_and_apart(session: Session) -> None:
    array = numpy.zeros(1000)
    session.push({"array": array})
    session.run("array += rank + 1")
    assert [got[0] for got in session.pull("array")] == [1, 2]
    assert array[0] == 0


def test_one_hundred_megabytes(session: Session) -> None:
    array = numpy.arange(13_000_000, dtype="float64")
    session.push({"large": array}, ranks="0")
    assert session.run("float(large[-1])", ranks="0").by_rank[0].value == 12_999_999.0
    assert numpy.array_equal(session.pull("large", ranks="0")[0], array)
    session.run("del large", ranks="0")


def test_tensors_of_every_kind_arrive_as_they_are(session: Session) -> None:
    torch = pytest.importorskip("torch")
    session.run(
        """
g = torch.Generator().manual_seed(3)
kinds = {
    "float": torch.randn(3, 4, generator=g),
    "bf16": torch.randn(5, generator=g).bfloat16(),
    "half": torch.ones(2).half(),
    "int8": torch.arange(3, dtype=torch.int8),
    "bool": torch.tensor([True, False]),
    "complex": torch.ones(2, dtype=torch.complex64) * 1j,
    "fp8": torch.ones(4).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(4.0),
    "empty": torch.ones(0, 3),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "slice": torch.arange(10)[2:4],
    "grad": torch.ones(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "nested": [{"deep": (torch.full((2,), 7.0).bfloat16(),)}],
}
"""
    )
    first, second = session.pull("kinds")
    for got in (first, second):
        assert got["float"].shape == (3, 4)
        assert got["bf16"].dtype == torch.bfloat16
        assert got["complex"].tolist() == [1j, 1j]
        assert got["fp8"].dtype == torch.float8_e4m3fn
        assert got["scalar"].shape == ()
        assert got["empty"].shape == (0, 3)
        assert got["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert got["slice"].tolist() == [2, 3]
        assert got["grad"].requires_grad
        assert isinstance(got["parameter"], torch.nn.Parameter)
        assert got["nested"][0]["deep"][0].tolist() == [7.0, 7.0]
    session.push({"back": first})
    code = "all(torch.equal(kinds[k].float(), back[k].float()) for k in kinds if k not in "
    assert session.run(code + "('nested', 'complex'))").value_list == [True, True]


def test_a_slice_of_a_large_tensor_travels_alone(session: Session) -> None:
    session.run("whole = torch.zeros(10_000_000); part = {'a': whole[:10]}")
    assert [len(got["a"].untyped_storage()) for got in session.pull("part")] == [40, 40]
    session.run("del whole, part")


def test_a_models_state_loads_where_it_arrives(session: Session) -> None:
    torch = pytest.importorskip("torch")
    session.run("torch.manual_seed(1); model = torch.nn.Linear(3, 2); state = model.state_dict()")
    state = session.pull("state")[0]
    here = torch.nn.Linear(3, 2)
    here.load_state_dict(state)
    session.push({"state": here.state_dict()})
    code = "model.load_state_dict(state); model(torch.ones(3)).tolist()"
    expected = here(torch.ones(3)).tolist()
    assert session.run(code).value_list == [pytest.approx(expected)] * 2


def test_a_whole_model_and_its_optimizer_travel(session: Session) -> None:
    torch = pytest.importorskip("torch")
    session.run("pair = (torch.nn.Linear(2, 2), [1]); pair[0].note = 'kept'")
    model, _ = session.pull("pair")[1]
    assert model.note == "kept"
    assert isinstance(model.weight, torch.nn.Parameter)
    assert model(torch.ones(2)).shape == (2,)


def test_functions_and_classes_made_in_a_cell_travel(session: Session) -> None:
    session.run(
        """
factor = 3
def times(x): return factor * x
class Box:
    def __init__(self, x): self.x = x
    def twice(self): return 2 * self.x
box = Box(rank + 5)
"""
    )
    times = session.pull("times")[0]
    assert times(4) == 12
    first, second = session.pull("box")
    assert (first.twice(), second.twice()) == (10, 12)
    session.push({"returned": first, "f": times})
    assert session.run("[returned.twice(), f(2)]").value_list == [[10, 6]] * 2


def test_what_cannot_be_pickled_is_one_error_and_changes_nothing(session: Session) -> None:
    session.run("safe = 'kept'")
    with pytest.raises(TransferError, match="here: A lock cannot be sent"):
        session.push({"safe": "new", "here": threading.Lock()})
    assert session.run("[safe, 'here' in globals()]").value_list == [["kept", False]] * 2
    session.run("import threading; lock = threading.Lock()")
    with pytest.raises(TransferError, match="cannot be sent"):
        session.pull("lock")
    assert session.run("safe").value_list == ["kept"] * 2


def test_a_name_that_some_rank_lacks_is_one_error(session: Session) -> None:
    session.run("partly = 1", ranks="0")
    with pytest.raises(TransferError, match=r"Rank 1 has no variable \"partly\""):
        session.pull("partly")
    assert session.pull("partly", ranks="0") == [1]


def test_an_object_whose_pickling_raises_is_one_error(session: Session) -> None:
    code = "class Bad:\n    def __reduce__(self): raise OSError('no way')\nbad = Bad()"
    session.run(code)
    with pytest.raises(TransferError, match="no way"):
        session.pull("bad")
    assert session.run("rank").value_list == [0, 1]


def test_an_object_the_ranks_cannot_make_is_one_error(session: Session, tmp_path: Path) -> None:
    import sys
    import types

    module = types.ModuleType("only_here")
    exec("class Thing: pass", module.__dict__)
    sys.modules["only_here"] = module
    try:
        with pytest.raises(TransferError, match="only_here"):
            session.push({"thing": module.Thing()})
    finally:
        del sys.modules["only_here"]
    assert session.run("rank").value_list == [0, 1]


def test_a_name_python_does_not_allow_is_refused(session: Session) -> None:
    with pytest.raises(UsageError, match="not a name"):
        session.push({"a b": 1})


def test_a_tensor_shared_by_two_names_may_be_pulled_from_each(session: Session) -> None:
    session.run("t = torch.arange(3.0); both = [t, t]")
    left, right = session.pull("both")[0]
    assert left.tolist() == right.tolist() == [0.0, 1.0, 2.0]
    assert left is right
