"""Passes that train in the order of an earlier one."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nbdist.engine.checks.epochs import Epochs
from nbdist.engine.training.cell import Pass

DATA = TensorDataset(torch.arange(8.0))


class Loop:
    """Trains, pass by pass, and tells what is told of each."""

    def __init__(self) -> None:
        self.epochs, self.step = Epochs(), 0
        self.kept: list[Any] = []

    def told(
        self, sampler: Any, optimizer: Any, data: Any = DATA, *, ends: bool = True
    ) -> dict[str, float]:
        iterator = iter(DataLoader(data, sampler=sampler))
        one_pass = Pass(len(self.kept), self.step)
        self.kept.append((iterator, one_pass))  # a new one may lie where an old one was
        found = self.epochs.repeated(optimizer, iterator, one_pass)
        self.step += 4
        one_pass.ended += ends
        return found


def sampler(data: Any = DATA, **options: Any) -> Any:
    return DistributedSampler(data, num_replicas=2, rank=0, **options)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


SAME, ANEW = {"same_epoch": 1.0, "made_anew": 0.0, "own_loader": 0.0}, {"made_anew": 1.0}


def test_a_sampler_whose_epoch_is_not_set_repeats_its_order() -> None:
    loop, one, kept = Loop(), optimizer(), sampler()
    assert [loop.told(kept, one) for _ in range(2)] == [{}, SAME]
    kept.set_epoch(1)
    assert loop.told(kept, one) == {}


def test_one_that_is_made_anew_does_too_but_of_another_epoch_or_seed_not() -> None:
    loop, one = Loop(), optimizer()
    assert [loop.told(sampler(), one) for _ in range(2)] == [{}, SAME | ANEW]
    assert loop.told(sampler(seed=1), one) == {}
    later = sampler()
    later.set_epoch(1)
    assert loop.told(later, one) == {}


def test_two_trainings_get_the_same_order_and_so_does_one_that_begins_again() -> None:
    loop, one, kept = Loop(), optimizer(), sampler()
    assert [loop.told(kept, optimizer()) for _ in range(3)] == [{}] * 3
    assert loop.told(kept, one) == {}
    one.load_state_dict(one.state_dict())
    assert loop.told(kept, one) == {}


def test_a_pass_that_has_not_come_to_its_end_may_have_been_a_look_once() -> None:
    loop, one, kept = Loop(), optimizer(), sampler()
    assert loop.told(kept, one, ends=False) == {}
    assert loop.told(kept, one, ends=False) == {}
    assert loop.told(kept, one, ends=False) == SAME


@pytest.mark.parametrize("options", [{"shuffle": False}, {}])
def test_other_data_and_data_that_is_not_shuffled_repeat_nothing(options: dict[str, Any]) -> None:
    loop, one = Loop(), optimizer()
    datas = [DATA] * 3 if options else [TensorDataset(torch.arange(8.0)) for _ in range(3)]
    assert [loop.told(sampler(d, **options), one, d) for d in datas] == [{}] * 3


def test_a_sampler_with_an_order_of_its_own_is_not_judged() -> None:
    class Own(DistributedSampler):  # type: ignore[type-arg]
        """Draws at each pass."""

        def __iter__(self) -> Any:
            return iter(torch.randperm(8).tolist())

    loop, one, kept = Loop(), optimizer(), Own(DATA, num_replicas=2, rank=0)
    assert [loop.told(kept, one) for _ in range(3)] == [{}] * 3
