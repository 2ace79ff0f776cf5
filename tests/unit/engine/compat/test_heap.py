"""Living objects are found on the heap without harm to what other threads are doing."""

import abc
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.engine.compat.heap import living


class Plan(abc.ABC):  # noqa: B024 (as torch's own schedules)
    """A class as torch's pipeline schedules are."""

    def __init__(self) -> None:
        self.steps = 3


class Long(Plan):
    """One of its kinds."""


def test_objects_of_a_class_and_of_those_below_it_are_found_and_no_others() -> None:
    plan, long = Plan(), Long()
    assert {id(o) for o in living(Plan)} == {id(plan), id(long)}
    assert living(Long) == [long]
    del plan, long
    assert living(Plan) == []


def test_modules_are_found_among_hundreds_of_classes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    found = {id(module) for module in living(nn.Module)}
    assert {id(module) for module in model.modules()} <= found


def test_a_lazy_proxy_is_neither_asked_nor_taken_for_what_it_stands_for() -> None:
    class Proxy:
        asked = False

        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            Proxy.asked = True
            return torch.optim.SGD

    proxy = Proxy()
    assert not any(o is proxy for o in living(torch.optim.Optimizer))
    assert not Proxy.asked


def test_a_class_whose_metaclass_refuses_to_be_hashed_is_no_trouble() -> None:
    class Meta(type):
        __hash__ = None  # type: ignore[assignment]

    class Module(nn.Module, metaclass=Meta):
        pass

    module = Module()
    assert any(o is module for o in living(nn.Module))


@pytest.mark.parametrize("base", [Plan, nn.Module])
def test_a_search_in_the_middle_of_a_collection_sees_nothing_that_is_half_gone(
    base: type[Any],
) -> None:
    seen: list[Any] = []

    # A code object is none of the collector's: it dies when the last of what holds it is cleared,
    # and its callback runs with others still to be cleared, as a thread does that gets the lock.
    last_words = make_garbage(lambda _: seen.append([type(o).__name__ for o in living(base)]))
    gc.collect()
    assert last_words() is None
    assert len(seen) == 1
    assert "Doomed" not in seen[0]


def make_garbage(call: Callable[[Any], None]) -> "weakref.ref[Any]":
    class Doomed(Plan):
        pass

    first, middle, last = Doomed(), Doomed(), Doomed()
    Doomed.known = first  # type: ignore[attr-defined]
    first.held = first  # type: ignore[attr-defined]
    middle.held = compile("1", "cell", "eval")  # type: ignore[attr-defined]
    last.others = [first, middle, last]  # type: ignore[attr-defined]
    middle.last = last  # type: ignore[attr-defined]
    return weakref.ref(middle.held, call)  # type: ignore[attr-defined]


@pytest.fixture
def quick_switches() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("base", [Plan, nn.Module])
def test_tuples_that_another_thread_builds_meanwhile_come_to_be(base: type[Any]) -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def build() -> None:
        while not done.is_set():
            try:
                tuple(i for i in range(3000))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    for _ in range(20):
        living(base)
    done.set()
    thread.join()
    assert errors == []
