"""A dataset's own generators, in workers that begin in the midst of an epoch."""

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from nbdist.engine.data.generators import own_generators
from nbdist.engine.data.make import loader


class Noisy(Dataset[float]):
    def __init__(self) -> None:
        self.transforms: list[Any] = [abs, Flip()]
        self.module = np
        self.itself = self

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return index


class Flip:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)


def test_generators_are_found_where_a_dataset_holds_them() -> None:
    assert own_generators(Subset(Noisy(), [0])) == ["Subset.dataset.transforms[1].rng"]
    made = [torch.Generator(), random.Random(0), np.random.RandomState(0)]
    assert own_generators(made) == ["list[0]", "list[1]", "list[2]"]
    assert own_generators([1, "a", np.ones(3), torch.nn.Linear(2, 2), Dataset()]) == []


@pytest.mark.parametrize(("workers", "consumed"), [(1, 4), (1, 0), (0, 4)])
def test_a_loop_that_goes_on_in_mid_epoch_says_what_its_workers_draw_otherwise(
    workers: int, consumed: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = loader(Noisy(), global_batch=2, num_workers=workers)
    data.load_state_dict({**data.state_dict(), "consumed": consumed})
    with caplog.at_level(logging.WARNING, "nbdist.data"):
        assert sum(map(len, data)) == 8 - consumed
        assert sum(map(len, data)) == 8
    told = [one for one in caplog.messages if "Noisy.transforms[1].rng as it was" in one]
    assert len(told) == (workers and consumed > 0)
