"""What a rank tells of the part of a dataset that a loop reads."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, random_split

from nbdist.engine.checks.splits import split_of

DATA = range(1000)


def drawn(seed: int, lengths: tuple[int, int] = (800, 200)) -> Subset[Any]:
    return random_split(DATA, lengths, torch.Generator().manual_seed(seed))[0]  # type: ignore[arg-type]


def told(dataset: Any, *, is_shared_out: bool = True) -> dict[str, float]:
    sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=0) if is_shared_out else None
    return split_of(iter(DataLoader(dataset, sampler=sampler)))


def test_splits_of_one_seed_are_equal_and_of_two_differ() -> None:
    assert told(drawn(0)) == told(drawn(0)) != {}
    assert told(drawn(0)) != told(drawn(1))


def test_the_length_and_a_subset_of_a_subset_count() -> None:
    assert told(Subset(drawn(0), range(100))) != told(Subset(drawn(0), range(101)))
    assert told(Subset(drawn(0), range(100))) != told(Subset(drawn(1), range(100)))


def test_a_subset_below_a_dataset_that_transforms_it_is_found() -> None:
    class Twice(Dataset[int]):
        """The usual way to transform one half of a split."""

        def __init__(self, subset: Subset[Any]) -> None:
            self.subset = subset

        def __len__(self) -> int:
            return len(self.subset)

        def __getitem__(self, i: int) -> int:
            return 2 * int(self.subset[i])

    assert told(Twice(drawn(0))) == told(drawn(0))


def test_indices_may_be_a_tensor() -> None:
    assert told(Subset(DATA, torch.arange(5))) == told(Subset(DATA, range(5)))  # type: ignore[arg-type]


def test_whole_datasets_and_parts_that_a_rank_has_chosen_for_itself_are_not_told() -> None:
    assert told(DATA) == {}
    assert told(drawn(0), is_shared_out=False) == {}
    assert split_of(None) == {}
