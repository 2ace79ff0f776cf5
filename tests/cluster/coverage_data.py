"""What the loops of test_coverage read and write: samples with an id, and the ids of each step."""

import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from datasets import Dataset as Hf
from datasets.distributed import split_dataset_by_node
from torch.utils.data import Dataset, IterableDataset

SAMPLES = 90


class Numbered(Dataset[dict[str, int]]):
    """A map-style dataset."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, int]:
        return {"id": i}


def parquet(folder: str) -> str:
    """Write a folder of Parquet files, of uneven row groups; once, by the first rank."""
    path = Path(folder, "parquet")
    if int(os.environ["RANK"]) == 0 and not path.exists():
        path.mkdir()
        for first in (0, 40):
            table = pa.table({"id": range(first, min(first + 50, SAMPLES) if first else 40)})
            pq.write_table(table, path / f"part-{first}.parquet", row_group_size=7)
    dist.barrier()
    return str(path)


def tars(folder: str) -> str:
    """Write three tars of WebDataset's; once, by the first rank."""
    path = Path(folder, "tars")
    if int(os.environ["RANK"]) == 0 and not path.exists():
        path.mkdir()
        for first in range(0, SAMPLES, 30):
            with tarfile.open(path / f"{first:03}.tar", "w") as tar:
                for i in range(first, first + 30):
                    about = tarfile.TarInfo(f"{i:05}.id")
                    about.size = len(content := str(i).encode())
                    tar.addfile(about, io.BytesIO(content))
    dist.barrier()
    return f"{path}/*.tar"


class Stream(IterableDataset[dict[str, int]]):
    """A stream without a state, which draws random numbers."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        torch.rand(())
        yield from ({"id": i} for i in range(SAMPLES))


class Stateful:
    """An iterable with a state, that goes on where it was left unless it is told otherwise."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.at < SAMPLES:
            self.at += 1
            yield {"id": self.at - 1}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def generated() -> Iterator[dict[str, int]]:
    """Give the samples, as a function that is called for each epoch."""
    yield from ({"id": i} for i in range(SAMPLES))


def hf_split(_: str) -> Any:
    """Return a stream of Hugging Face's that a program has split by node, on each rank."""
    stream = Hf.from_dict({"id": list(range(SAMPLES))}).to_iterable_dataset(num_shards=6)
    shuffled = stream.shuffle(seed=1, buffer_size=16)
    return split_dataset_by_node(shuffled, dist.get_rank(), dist.get_world_size())


def hf_stream(_: str) -> Any:
    """Return a stream of Hugging Face's."""
    return Hf.from_dict({"id": list(range(SAMPLES))}).to_iterable_dataset(num_shards=3)


# Names as cells have them, for coverage tells loaders by these.
SOURCES: dict[str, Callable[[str], Any]] = {
    "map_style": lambda _: Numbered(),
    "parquet": parquet,
    "webdataset_tars": tars,
    "iterable_dataset": lambda _: Stream(),
    "stateful_iterable": lambda _: Stateful(),
    "generator_function": lambda _: generated,
    "hf_dataset": lambda _: Hf.from_dict({"id": list(range(SAMPLES))}).with_format("torch"),
    "hf_stream": hf_stream,
    "hf_stream_split_by_node": hf_split,
}


def ids(batch: Any) -> list[int]:
    """Return the ids of a batch of any of the sources."""
    return [int(one) for one in torch.as_tensor(batch["id"])]


def write(folder: str, rank: int, step: int, epoch: int, batches: dict[str, Any]) -> None:
    """Write down a step that was made: with its number, for a restored training makes it again."""
    line = [rank, step, epoch, {name: ids(batch) for name, batch in batches.items()}]
    with open(f"{folder}/ids-{os.getpid()}", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def seen(folder: str) -> Iterator[tuple[str, int, Counter[int]]]:
    """Return by source and epoch how often each id was in a step."""
    steps: dict[tuple[int, int], tuple[int, dict[str, list[int]]]] = {}
    for path in sorted(Path(folder).glob("ids-*"), key=lambda path: path.stat().st_mtime_ns):
        for line in path.read_text("utf-8").splitlines():
            rank, step, epoch, by_source = json.loads(line)
            steps[rank, step] = epoch, by_source
    counted: dict[tuple[str, int], Counter[int]] = {}
    for epoch, by_source in steps.values():
        for name, of_step in by_source.items():
            counted.setdefault((name, epoch), Counter()).update(of_step)
    for (name, epoch), times in sorted(counted.items()):
        yield name, epoch, times
