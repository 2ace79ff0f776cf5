"""An order without memory: each sample once, whatever their number, and none kept."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from nbdist.engine.data.batches import mix
from nbdist.engine.data.make import loader
from nbdist.engine.data.order.permutation import Permutation
from nbdist.engine.data.order.sampler import MANY, Batches

SEEDS = st.integers(0, 2**63 - 1)


class Big(Dataset[int]):
    def __len__(self) -> int:
        return 3_000_000_000

    def __getitem__(self, index: int) -> int:
        return index


@given(samples=st.integers(1, 3000), seed=SEEDS)
@settings(deadline=None)
def test_each_sample_stands_at_one_place(samples: int, seed: int) -> None:
    order = Permutation(samples, seed)
    assert sorted(order[:].tolist()) == list(range(samples))


@given(start=st.integers(0, 4096), seed=SEEDS)
@settings(deadline=None)
def test_a_slice_is_what_stands_at_its_places(start: int, seed: int) -> None:
    order = Permutation(4099, seed)
    assert order[start : start + 3].tolist() == [
        order[n] for n in range(start, min(start + 3, 4099))
    ]


def test_an_order_is_as_mixed_as_a_drawn_one_and_another_with_each_seed() -> None:
    samples = 1_000_003
    orders = np.stack([Permutation(samples, seed)[:] for seed in range(3)]).astype(float)
    places = np.arange(samples, dtype=float)
    # Of independent ones the correlation is 0 +- 0.001, and one pair in e is a neighbour's again.
    assert np.abs(np.corrcoef([places, *orders]) - np.eye(4)).max() < 0.005
    assert np.abs(np.corrcoef(orders[:, :-1], orders[:, 1:])[:3, 3:]).max() < 0.005
    fixed = [(order == places).sum() for order in orders]
    assert max(fixed) < 10


def test_a_loader_over_billions_begins_at_once_and_goes_on_where_it_was() -> None:
    data = Big()
    train = loader(data, global_batch=32, seed=4)
    assert len(train) == 93_750_000
    loop = iter(train)
    seen = [next(loop).tolist() for _ in range(3)]
    again = loader(data, global_batch=32, seed=4)
    again.load_state_dict({**train.state_dict(), "consumed": 64})
    assert next(iter(again)).tolist() == seen[2]
    assert again.batches_left == 93_750_000 - 3
    numbers = [one for batch in seen for one in batch]
    assert len(set(numbers)) == 96
    assert max(numbers) > 2**31


@pytest.mark.parametrize(("samples", "is_kept"), [(1000, True), (MANY, False)])
def test_below_its_bound_an_order_is_torchs_own(samples: int, is_kept: bool) -> None:
    batches = Batches(samples, 8, shuffle=True, seed=3, drop_last=False)
    (first,) = batches.ids(2, [0])
    if is_kept:
        generator = torch.Generator().manual_seed(mix(3, 2))
        assert first == torch.randperm(samples, generator=generator)[0]
    else:
        assert first == Permutation(samples, mix(3, 2))[0]
