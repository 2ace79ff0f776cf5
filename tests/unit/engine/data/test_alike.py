"""What tells that ranks hold other samples at the same places."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from nbdist.engine.data.alike import differing, digests

WHOLE = TensorDataset(torch.arange(10_000.0))


class Files(Dataset[str]):
    def __init__(self, rank: int, files: list[str]) -> None:
        self.rank, self.folder, self.files = rank, f"/scratch/{rank}", files
        self.cache: dict[int, Any] = {rank: rank}

    def __getitem__(self, index: int) -> str:
        return self.files[index]


@pytest.mark.parametrize(
    ("mine", "other", "name"),
    [
        (Subset(WHOLE, [1, 2, 3]), Subset(WHOLE, [1, 3, 2]), "dataset.indices"),
        (
            Subset(Subset(WHOLE, range(9)), [1, 2]),
            Subset(Subset(WHOLE, range(9)), [1, 3]),
            "dataset.indices",
        ),
        (ConcatDataset([WHOLE, WHOLE]), ConcatDataset([WHOLE, WHOLE]), ""),
        (
            TensorDataset(torch.ones(3, 2), torch.ones(3)),
            TensorDataset(torch.ones(3, 2), torch.zeros(3)),
            "dataset.tensors[1]",
        ),
        (np.arange(5), np.arange(5) + 1, "dataset"),
        (Files(0, ["/a/0/x", "/a/0/y"]), Files(1, ["/a/1/x", "/a/1/y"]), ""),
        (Files(0, ["x", "y"]), Files(1, ["y", "x"]), "dataset.files"),
        ([object()], [object()], ""),
    ],
)
def test_what_says_which_sample_stands_where_is_compared_and_named(
    mine: Any, other: Any, name: str
) -> None:
    assert differing([digests(mine), digests(other), digests(mine)]) == name
    assert differing([digests(mine), digests(mine)]) == ""
