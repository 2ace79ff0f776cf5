"""What the ranks run in test_sources: loaders over files and tables, whose samples are numbered."""

import logging
import random
from typing import Any

import numpy as np
import torch

from nbdist.engine.data.loaders import Loader
from nbdist.engine.data.make import loader
from nbdist.shared.errors import NBDistError
from tests.group.loader_ranks import Numbers, allow_workers


def made(data: Any, **options: Any) -> Loader[Any]:
    if options.get("num_workers"):
        # The harness's own way starts an interpreter, which imports torch: seconds a rank.
        options["multiprocessing_context"] = "fork"
    return loader(data, **{"global_batch": 24, "seed": 7, "columns": ["id"], **options})


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def epochs(data: Any, count: int, options: dict[str, Any]) -> list[list[list[int]]]:
    """Return this rank's samples of `count` epochs, by batch."""
    allow_workers()
    train = made(data, **options)
    return [ids(train) for _ in range(count)]


def stop_after(data: Any, batches: int, workers: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Take some batches of epoch 1, and the state in the body of the last one."""
    allow_workers()
    train = made(data, num_workers=workers)
    ids(train)
    seen: list[list[int]] = []
    for batch in train:
        seen.append(batch["id"].tolist())
        if len(seen) == batches:
            return seen, train.state_dict()
    raise AssertionError("the epoch was too short")


def go_on(data: Any, state: dict[str, Any], options: dict[str, Any]) -> list[list[int]]:
    """Resume: the rest of the epoch."""
    train = made(data, **options)
    train.load_state_dict(state)
    return ids(train)


def iceberg(uri: str, warehouse: str, count: int) -> list[list[list[int]]]:
    """Return this rank's samples of `count` epochs over the table n.t of a catalog."""
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("c", uri=uri, warehouse=warehouse)
    try:
        return epochs(catalog.load_table("n.t"), count, {})
    finally:
        catalog.close()


def draw(sample: Any) -> tuple[int, float, float, float]:
    """Return a sample's number, and what its transform draws of each generator."""
    number = sample["id"] if isinstance(sample, dict) else sample
    return int(number), torch.rand(()).item(), random.random(), float(np.random.rand())


def draws(data: Any, workers: int) -> dict[str, Any]:
    """Return what transforms draw: of files, of items by index, and what this rank does after."""
    allow_workers()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    how: dict[str, Any] = {"transform": draw, "num_workers": workers}
    files = [one for batch in made(data, collate_fn=list, **how) for one in batch]
    items = [
        one for batch in made(Numbers(48), columns=None, collate_fn=list, **how) for one in batch
    ]
    return {"files": files, "items": items, "kept": torch.equal(before, torch.get_rng_state())}


def error_of(data: Any, state: dict[str, Any] | None = None) -> str:
    """Return what is said of data that cannot be loaded, or not from that state."""
    try:
        train = made(data)
        if state is not None:
            train.load_state_dict(state)
    except NBDistError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def warnings_of(data: Any, interleave: int) -> list[str]:
    """Return what two epochs of a loader log on this rank."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nbdist.data").addHandler(handler)
    train = made(data, interleave=interleave)
    for _ in range(2):
        ids(train)
    return heard
