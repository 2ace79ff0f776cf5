"""What the loops of test_coverage read and write: samples with an id, and the ids of each step."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

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


# Names as cells have them, for coverage tells loaders by these.
SOURCES: dict[str, Callable[[str], Any]] = {
    "map_style": lambda _: Numbered(),
    "parquet": parquet,
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
