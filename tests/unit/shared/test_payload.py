"""Objects to buffers and back, without torch."""

import threading
from typing import Any

import numpy
import pytest

from nbdist.shared.errors import TransferError
from nbdist.shared.payload import pack, unpack


def test_arrays_travel_out_of_band_wherever_they_stand() -> None:
    array = numpy.arange(100_000)
    buffers = pack({"deep": [{"here": array}], "twice": array})
    assert len(bytes(buffers[0])) < 2000
    assert sum(memoryview(b).nbytes for b in buffers[1:]) == array.nbytes
    got = unpack(buffers)
    assert numpy.array_equal(got["deep"][0]["here"], array)
    assert got["twice"] is got["deep"][0]["here"]


def test_what_arrives_may_be_written_and_is_a_copy() -> None:
    array = numpy.zeros(3)
    got: Any = unpack(pack(array))
    got[0] = 1
    assert array[0] == 0


def test_a_class_of_the_notebook_travels_by_value() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class Box:\n    def __init__(self, x): self.x = x", namespace)
    got: Any = unpack(pack(namespace["Box"](5)))
    assert got.x == 5


def test_a_lambda_of_a_module_travels_by_value() -> None:
    base = 3
    got: Any = unpack(pack({"add": lambda x: x + base}))
    assert got["add"](4) == 7


def test_what_cannot_be_pickled_is_named_with_a_way_out() -> None:
    with pytest.raises(TransferError, match=r"(?s)A lock cannot be sent.*Do:"):
        pack(threading.Lock())
