"""Notes where code beside the cell's and ours asks which rank it runs on.

What a cell's own code asks is read (`kinds`). torch and nbdist ask to know their part of a mesh.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DistributedSampler

import nbdist
from nbdist.engine.dry.place import in_words
from nbdist.engine.dry.rank_log import RankLog

_OURS = tuple(os.path.dirname(str(one.__file__)) + os.sep for one in (torch, nbdist))
_BETWEEN = ("<frozen os>", "<frozen _collections_abc>", os.__file__)  # of `os.getenv`


def watch(log: RankLog) -> None:
    """Note it in a log. Of this process, for good."""
    of_group = ("get_rank", "get_group_rank", "get_node_local_rank")
    asked: list[tuple[Any, str]] = [(dist, name) for name in of_group]
    asked += [(dist.distributed_c10d, name) for name in of_group]
    asked += [(DeviceMesh, name) for name in ("get_rank", "get_local_rank", "get_coordinate")]
    asked += [(dist.ProcessGroup, "rank"), (type(os.environ), "__getitem__")]
    for place, name in asked:
        setattr(place, name, _noted(log, getattr(place, name), is_key=name == "__getitem__"))
    samples = DistributedSampler.__iter__

    def of_rank(sampler: Any) -> Iterator[Any]:
        log.asks_rank = True
        return samples(sampler)

    DistributedSampler.__iter__ = of_rank  # type: ignore[method-assign]


def _noted(log: RankLog, asked: Callable[..., Any], *, is_key: bool) -> Callable[..., Any]:
    @functools.wraps(asked)
    def answer(*args: Any, **keywords: Any) -> Any:
        if not is_key or "RANK" in str(args[-1]):
            frame = sys._getframe(1)
            while frame.f_code.co_filename in _BETWEEN and frame.f_back is not None:
                frame = frame.f_back
            file = frame.f_code.co_filename
            log.asks_rank |= not (file.startswith(_OURS) or in_words(file, 0))
        return asked(*args, **keywords)

    return answer
