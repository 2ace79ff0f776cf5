"""What the ranks run in test_loader: samples are numbers, so that a batch shows what it holds."""

import multiprocessing
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from nbdist.engine.data import Loader, loader
from nbdist.errors import UsageError


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
        return iter(range(3))


def allow_workers() -> None:
    """Let this rank have children: the harness starts ranks as daemons, engines are none."""
    multiprocessing.current_process()._config["daemon"] = False


def samples(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def epochs(n: int, global_batch: int, count: int, options: dict[str, Any]) -> list[list[list[int]]]:
    """Return this rank's batches of `count` epochs."""
    data = loader(Numbers(n), global_batch=global_batch, **options)
    seen = [samples(data) for _ in range(count)]
    assert all(len(epoch) == len(data) for epoch in seen)
    return seen


def stop_after(
    n: int, global_batch: int, batches: int, workers: int
) -> tuple[list[list[int]], dict[str, int]]:
    """Take some batches of epoch 1, and the state in the body of the last one."""
    allow_workers()
    data = loader(Numbers(n), global_batch=global_batch, num_workers=workers, seed=7)
    samples(data)
    seen = []
    for batch in data:
        seen.append(batch.tolist())
        if len(seen) == batches:
            return seen, data.state_dict()
    raise AssertionError("the epoch was too short")


def go_on(
    n: int, global_batch: int, state: dict[str, int]
) -> tuple[int, list[list[int]], list[list[int]], int]:
    """Resume: batches left, the rest of the epoch, the next one, and the length."""
    data = loader(Numbers(n), global_batch=global_batch)
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


def noises(workers: int) -> list[float]:
    """Return the random numbers that this rank's samples drew, in two epochs."""
    allow_workers()
    data = loader(Numbers(8, noise=True), global_batch=8, num_workers=workers)
    return [number for _ in range(2) for _, noise in data for number in noise.tolist()]


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
    refused("sampler", Numbers(8), global_batch=4, sampler=[0])
    refused("stream", Stream(), global_batch=4)
    refused("generator", (i for i in range(3)), global_batch=4)
    refused("small batch", Numbers(8), global_batch=1)
    refused("float batch", Numbers(8), global_batch=4.0)
    refused("few samples", Numbers(1), global_batch=4)
    data = loader(Numbers(8), global_batch=4)
    try:
        data.load_state_dict({**data.state_dict(), "samples": 9})
    except UsageError as error:
        texts["another dataset"] = str(error)
    return texts
