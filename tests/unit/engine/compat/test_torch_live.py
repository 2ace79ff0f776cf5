"""Which objects of the watched classes live, and in what order they were made."""

import gc
import inspect

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from nbdist.engine.compat import torch_live
from nbdist.engine.compat.torch_live import LiveObjects


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_objects_are_known_in_the_order_of_making_as_long_as_they_live() -> None:
    objects, first, second = LiveObjects(), optimizer(), optimizer()
    assert objects.newest_number() == objects.number_of(torch.optim.Optimizer, first) == 0
    for one in (first, second):
        objects.remember(torch.optim.Optimizer, one)
    assert objects.live(torch.optim.Optimizer) == [first, second]
    assert objects.newest_number() == objects.number_of(torch.optim.Optimizer, second) == 2
    del one, second
    gc.collect()
    assert objects.live(torch.optim.Optimizer) == [first]
    assert objects.newest_number() == 2


def test_what_is_made_unseen_is_neither_known_nor_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched:
        """A class of torch's."""

    told: list[object] = []
    monkeypatch.setattr(torch_live, "_WATCHED", (Watched,))
    objects = LiveObjects()
    objects.watch(told.append)
    with objects.unseen():
        unknown = Watched()
    known = Watched()
    assert objects.live(Watched) == told == [known]
    del unknown


@pytest.fixture
def schedulers(monkeypatch: pytest.MonkeyPatch) -> LiveObjects:
    """Objects that watch schedulers alone, until the test ends."""
    kinds = [LRScheduler, *torch_live._below(LRScheduler)]
    for kind in (kind for kind in kinds if "__init__" in vars(kind)):
        monkeypatch.setattr(kind, "__init__", inspect.unwrap(vars(kind)["__init__"]))
    monkeypatch.setattr(LRScheduler, "__init_subclass__", object.__init_subclass__, raising=False)
    monkeypatch.setattr(torch_live, "_WATCHED", (LRScheduler,))
    return LiveObjects()


def test_schedulers_whose_class_leaves_out_its_base_classs_constructor_are_known(
    schedulers: LiveObjects,
) -> None:
    told: list[object] = []
    schedulers.watch(told.append)

    class Own(LRScheduler):
        """A schedule of a cell, made after all others were watched."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    one = optimizer()
    linear, constant = lr_scheduler.LinearLR(one), lr_scheduler.ConstantLR(one)
    made = [
        linear,
        constant,
        lr_scheduler.SequentialLR(one, [linear, constant], [2]),
        lr_scheduler.ChainedScheduler([linear, constant]),
        lr_scheduler.ReduceLROnPlateau(one),
        Own(one),
    ]
    assert schedulers.live(LRScheduler) == told == made


def test_what_is_forgotten_is_alive_and_not_known() -> None:
    objects, one = LiveObjects(), optimizer()
    objects.remember(torch.optim.Optimizer, one)
    objects.forget(one)
    assert objects.live(torch.optim.Optimizer) == []
