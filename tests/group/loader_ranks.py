"""What the ranks run in test_loader: samples are numbers, so that a batch shows what it holds."""

import multiprocessing
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from nbdist.engine.data.batches import mix
from nbdist.engine.data.coverage import coverage
from nbdist.engine.data.loaders import Loader
from nbdist.engine.data.make import loader
from nbdist.engine.data.position import position, resume
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.rank import components
from nbdist.shared.errors import UsageError
from nbdist.shared.wire import CellStart
from tests.group import models
from tests.group.layout_ranks import difference, state_of


class Numbers(Dataset[int]):
    """Samples 0 ... n - 1; `noise` adds a random number from the worker's generator."""

    def __init__(self, n: int, noise: bool = False) -> None:
        self.n, self.noise = n, noise

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return (i, torch.rand(()).item()) if self.noise else i


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(13))


class AnyOrder:
    """A sampler whose order nobody can have again."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter(random.SystemRandom().sample(range(8), 8))


def streams(workers: int) -> dict[str, Any]:
    """Return what a loop over a stream gets on this rank, and what its loader says of itself."""
    allow_workers()
    data = loader(Stream(), global_batch=4, shuffle=False, num_workers=workers, transform=doubled)
    told = {"batches": [samples(data) for _ in range(2)], "epoch": data.epoch}
    for name in ("__len__", "batches_left"):
        try:
            getattr(data, name)()
        except TypeError as error:
            told[name] = str(error)
    return told


def doubled(sample: int) -> int:
    return 2 * sample


def own_order(kind: str, stop_after: int, state: dict[str, Any] | None) -> Any:
    """Loop in a sampler's order: batches of two epochs, or some, and the state then."""
    data = Numbers(20)
    made: dict[str, Any] = {
        "weighted": WeightedRandomSampler([1.0] * 10 + [0.0] * 10, 16),
        "random": RandomSampler(data),
        "set_epoch": DistributedSampler(data, num_replicas=1, rank=0),
    }
    loop = loader(data, global_batch=4, sampler=made[kind])
    if state is not None:
        loop.load_state_dict(state)
    seen: list[list[int]] = []
    while loop.epoch < 2:
        for batch in loop:
            seen.append(batch.tolist())
            if len(seen) == stop_after:
                return seen, loop.state_dict()
    return seen, None


def rank() -> int:
    return dist.get_rank()


def allow_workers() -> None:
    """Let this rank have children: the harness starts ranks as daemons, engines are none.

    Workers are forked, as on engines: the harness' own way would import torch for them.
    """
    multiprocessing.set_start_method("fork", force=True)
    vars(multiprocessing.current_process())["_config"]["daemon"] = False


def samples(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def epochs(n: int, global_batch: int, count: int, options: dict[str, Any]) -> list[list[list[int]]]:
    """Return this rank's batches of `count` epochs."""
    data = loader(Numbers(n), global_batch=global_batch, **options)
    seen = [samples(data) for _ in range(count)]
    assert all(len(epoch) == len(data) for epoch in seen)
    return seen


def stop_after(
    n: int, global_batch: int, batches: int, workers: int, weights: list[float] | None = None
) -> tuple[list[list[int]], dict[str, int]]:
    """Take some batches of epoch 1, and the state in the body of the last one."""
    allow_workers()
    options: dict[str, Any] = {"num_workers": workers, "seed": 7, "weights": weights}
    data = loader(Numbers(n), global_batch=global_batch, **options)
    samples(data)
    seen = []
    for batch in data:
        seen.append(batch.tolist())
        if len(seen) == batches:
            return seen, data.state_dict()
    raise AssertionError("the epoch was too short")


def go_on(
    n: int, global_batch: int, state: dict[str, int], weights: list[float] | None = None
) -> tuple[int, list[list[int]], list[list[int]], int]:
    """Resume: batches left, the rest of the epoch, the next one, and the length."""
    data = loader(Numbers(n), global_batch=global_batch, weights=weights)
    data.load_state_dict(state)
    return data.batches_left, samples(data), samples(data), len(data)


def leave_loops() -> dict[str, Any]:
    data: Loader[int] = loader(Numbers(12), global_batch=2)
    first = next(iter(data)).tolist()
    look_again = next(iter(data)).tolist()
    after_looks = data.epoch
    for i, _ in enumerate(data):
        if i == 1:
            break
    left = data.batches_left
    fresh = samples(data)
    return {
        "looks alike": first == look_again,
        "epoch after looks": after_looks,
        "left": left,
        "epoch": data.epoch,
        "fresh": sorted(i for batch in fresh for i in batch),
        "another order": fresh[0] != first,
    }


def two_loops(workers: int) -> dict[str, Any]:
    """Begin a loop in the midst of another, and after its end."""
    allow_workers()
    how: dict[str, Any] = {"num_workers": workers, "persistent_workers": bool(workers)}
    data: Loader[int] = loader(Numbers(8), global_batch=2, **how)
    first = iter(data)
    taken = [next(first).tolist() for _ in range(2)]
    second = iter(data)
    inner = samples(second)
    try:
        next(first)
    except UsageError as error:
        told = str(error)
    newest = iter(data)
    return {
        "inner": sorted(i for batch in inner for i in batch),
        "another epoch": inner[:2] != taken,
        "told": told,
        "over": next(second, "over"),  # takes nothing from the newest
        "newest": sorted(i for batch in newest for i in batch.tolist()),
    }


def noises(workers: int) -> list[float]:
    """Return the random numbers that this rank's samples drew, in two epochs."""
    allow_workers()
    data = loader(Numbers(8, noise=True), global_batch=8, num_workers=workers)
    return [number for _ in range(2) for _, noise in data for number in noise.tolist()]


class Drawing(Dataset[Any]):
    """Samples that are drawn of each of a process's generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        return i, random.random(), float(np.random.rand()), torch.rand(()).item()


def drawing(samples: list[int]) -> list[Any]:
    return [Drawing()[i] for i in samples]


def draws(kind: str, workers: int, stop: int, state: dict[str, Any] | None) -> Any:
    """Return what two epochs draw in workers, or what some batches of them do, and the state."""
    allow_workers()
    how: dict[str, Any] = {"global_batch": 4, "seed": 5, "num_workers": workers}
    if kind == "samples":
        data = loader(Drawing(), collate_fn=list, **how)
    elif kind == "collated":
        data = loader(iter_of_24, collate_fn=drawing, **how)
    else:
        generator = torch.Generator().manual_seed(8)
        data = loader(Drawing(), collate_fn=list, generator=generator, **how)
    if state is not None:
        data.load_state_dict(state)
    seen: list[Any] = []
    while data.epoch < 2:
        for batch in data:
            seen.append(batch)
            if len(seen) == stop:
                return seen, data.state_dict()
    return seen, None


def iter_of_24() -> Any:
    return iter(range(24))


def coverages() -> dict[str, Any]:
    """Return what coverage says of an epoch over samples that no position tells."""
    torch.manual_seed(rank())  # as a cell that draws other numbers on each rank
    found: dict[str, Any] = {}

    def cover(data: Any, **how: Any) -> Any:
        loop = loader(data, global_batch=4, **how)
        seen = [sample for batch in samples(loop) for sample in batch]
        found = coverage()
        return seen, found.epochs[-1], found.verdict

    weighted = WeightedRandomSampler([1.0] * 24, 24)
    found["weighted"] = cover(Numbers(24), sampler=weighted)
    # Nobody goes back to the loader any more.
    components.begin((position.here, resume.here), CellStart(1, (0, 1), 1))
    found["gone"] = None, coverage().epochs[-1], coverage().verdict
    found["split"] = cover(random_split(Numbers(12), [8, 4])[0])
    return found


WEIGHTS = [1.0, 0.25]


def weighted_ways() -> dict[str, dict[str, Any]]:
    """Return what `weighted` does, by layout and way."""
    ways = [("ddp", "step"), ("zero3", "step"), ("ddp", "share"), ("ddp", "plain")]
    return {f"{layout}, {way}": weighted(layout, way) for layout, way in ways}


def weighted(layout: str, way: str) -> dict[str, Any]:
    """Train an epoch on unequal parts, and alone on the whole batches; return how they differ."""
    dtype = torch.float64
    data = TensorDataset(*models.batch("gpt", 0, 26, dtype))
    mine, whole = models.make("gpt", dtype), models.make("gpt", dtype)
    spread = parallelize(mine, layout)
    sizes = []

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return models.loss_of("gpt", out, y)

    opt = torch.optim.AdamW(mine.parameters(), lr=1e-3)
    train = loader(data, global_batch=10, weights=WEIGHTS)
    for x, y in train:
        if way == "step":
            spread.step(x, y, loss_fn)
        else:
            (loss_fn(mine(x), y) * (train.share if way == "share" else 1.0)).backward()
        opt.step()
        opt.zero_grad()
        sizes.append(len(x))
    alone = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(mix(0, 0))
    for batch in torch.randperm(26, generator=generator).split([10, 10, 6]):
        loss_fn(whole(data[batch][0]), data[batch][1]).backward()
        alone.step()
        alone.zero_grad()
    return {"difference": difference(state_of(mine), state_of(whole)), "sizes": sizes}


def leaves_the_global_generator() -> bool:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    samples(loader(Numbers(8), global_batch=4))
    return torch.equal(before, torch.get_rng_state())


def refusals() -> dict[str, str]:
    texts = {}

    def refused(label: str, data: Any, **options: Any) -> None:
        try:
            loader(data, **options)
        except UsageError as error:
            texts[label] = str(error)

    refused("batch_size", Numbers(8), global_batch=4, batch_size=2)
    refused("batch_sampler", Numbers(8), global_batch=4, batch_sampler=[[0]])
    refused("a rank's part", Numbers(8), global_batch=4, sampler=DistributedSampler(Numbers(8)))
    refused("an iterator", Numbers(8), global_batch=4, sampler=iter([0]))
    generator = torch.Generator().manual_seed(5)
    own = RandomSampler(Numbers(8), generator=generator)
    refused("its generator", Numbers(8), global_batch=4, sampler=own)
    if not torch.equal(generator.get_state(), torch.Generator().manual_seed(5).get_state()):
        texts["its generator"] = "changed"
    refused("any order", Numbers(8), global_batch=4, sampler=AnyOrder())
    refused("of a stream", Stream(), global_batch=4, sampler=[0])
    refused("generator", (i for i in range(3)), global_batch=4)
    refused("no data", 3, global_batch=4)
    refused("no order", Numbers(8), global_batch=4, in_order=False)
    refused("small batch", Numbers(8), global_batch=1)
    refused("float batch", Numbers(8), global_batch=4.0)
    refused("few samples", Numbers(1), global_batch=4)
    refused("three weights", Numbers(8), global_batch=4, weights=[1, 1, 1])
    refused("no weight", Numbers(8), global_batch=4, weights=[1, 0])
    refused("a word", Numbers(8), global_batch=4, weights="measure")
    data = loader(Numbers(8), global_batch=4)
    try:
        data.load_state_dict({**data.state_dict(), "samples": 9})
    except UsageError as error:
        texts["another dataset"] = str(error)
    return texts
