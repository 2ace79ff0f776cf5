"""What the ranks run in test_mean: means over unequal counts, and values that must be one."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import nbdist

COUNTS = {0: [4, 4, 1], 1: [4]}
VALUES = {0: [0.1, 0.25, 1.0], 1: [0.7]}


@dataclass
class Config:
    layers: int
    vocabulary: list[str]


def said(value: Any, name: str = "labels") -> str:
    try:
        nbdist.same(value, name)
    except nbdist.NBDistError as error:
        return f"{type(error).__name__}: {error}"
    return "same"


def on_two_ranks() -> dict[str, Any]:
    rank = dist.get_rank()
    nan = float("nan")
    letters = {"b", "a", "c"}
    return {
        "batches": nbdist.mean(VALUES[rank], COUNTS[rank]),
        "tensor": nbdist.mean(
            torch.tensor(VALUES[rank], dtype=torch.float64), torch.tensor(COUNTS[rank])
        ),
        "none here": nbdist.mean(None if rank else 2.0, 0 if rank else 3),
        "nan of nothing": nbdist.mean([3.0, nan], [2, 0]),
        "nothing": nbdist.mean(nan, 0),
        "equal": [
            said({"a": 1, "b": [1, 2]} if rank else {"b": [1, 2], "a": 1}),
            said(letters),
            said(Config(2, ["x"])),
            said((torch.arange(3), np.arange(4), None, 1.5, float("nan"))),
        ],
        "map": said({"cat": rank, "dog": 2}),
        "shorter": said(list(range(3 + rank)), "split"),
        "field": said(Config(2, ["x", "y"][: 1 + rank]), "config"),
        "set": said({"a", f"b{rank}"}),
        "type": said(1 if rank else 1.0),
        "tensor differs": said(torch.tensor([1.0, 2.0 + rank])),
        "unknown": said(object() if rank else 1),
    }
