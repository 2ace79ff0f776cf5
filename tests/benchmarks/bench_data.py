"""How fast `nbdist.loader` reads files and tables, and what it holds of them.

Real ranks read 2 million rows of 92 bytes, 32 row groups of 6 MB, in batches of 4096, in turns with
a bare scan of the same files by pyarrow (`dataset.to_batches`), of as many threads: on two ranks
each scans half of the files, and the pass ends with the slower one. The best of some rounds counts:
all cores are wanted, so whoever else works on the machine takes from both.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.table import Row, apart

FILES, GROUPS, ROWS = 8, 4, 65_536
SAMPLES, BATCH, ROUNDS = FILES * GROUPS * ROWS, 4096, 4
ORDERED_GOAL, SHUFFLED_GOAL = 1.11, 1.43  # 90 % of the scan, and 70 %
MEMORY_GOAL, FIRST_GOAL_MS = 1.0, 2000.0
# As docs/how-it-works/data.md says: groups that a reader thread holds, and what Arrow's allocator
# keeps of what is free.
DECODING, KEPT = 3, 1.25


def write(folder: Path, delta: Path | None = None) -> None:
    """Write the set as Parquet files, and as a Delta table."""
    import deltalake
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    draw, rows = np.random.default_rng(0), GROUPS * ROWS
    for n in range(FILES):
        vectors = draw.random(rows * 16, dtype=np.float32)
        table = pa.table(
            {
                "id": np.arange(n * rows, (n + 1) * rows),
                "x": draw.random(rows, dtype=np.float32),
                "y": draw.random(rows),
                "label": draw.integers(0, 1000, rows).astype(np.int32),
                "vector": pa.FixedSizeListArray.from_arrays(vectors, 16),
            }
        )
        pq.write_table(table, folder / f"{n:02}.parquet", row_group_size=ROWS)
        if delta is not None:
            size = deltalake.WriterProperties(max_row_group_size=ROWS)
            deltalake.write_deltalake(str(delta), table, mode="append", writer_properties=size)


def passes(folder: str, delta: str) -> dict[str, list[float]]:
    """Return the seconds of each kind of pass on this rank, a round each; ranks wait for all."""
    import deltalake
    import pyarrow as pa
    import pyarrow.dataset as ds
    import torch.distributed as dist

    import nbdist
    from nbdist.engine.data.reading import reader_threads

    pa.set_cpu_count(reader_threads.wanted(False, reader_threads.own_cores()))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    took: dict[str, list[float]] = {}

    def timed(what: str, do: Callable[[], int]) -> None:
        dist.barrier()
        began = time.perf_counter()
        rows = do()
        dist.barrier()
        took.setdefault(what, []).append(time.perf_counter() - began)
        assert rows == SAMPLES // ranks, f"{what}: {rows}"

    def scanned(dataset: Any) -> int:
        mine = ds.dataset(sorted(dataset.files)[rank::ranks], filesystem=dataset.filesystem)
        return sum(batch.num_rows for batch in mine.to_batches())

    loaders = {
        "files in order": nbdist.loader(folder, global_batch=BATCH, shuffle=False),
        "files shuffled": nbdist.loader(folder, global_batch=BATCH),
        "delta in order": nbdist.loader(delta, global_batch=BATCH, shuffle=False),
        "delta shuffled": nbdist.loader(delta, global_batch=BATCH),
    }
    files, table = ds.dataset(folder), deltalake.DeltaTable(delta).to_pyarrow_dataset()
    for _ in range(ROUNDS + 1):
        for name, dataset in (("files", files), ("delta", table)):
            timed(f"{name} scanned", lambda dataset=dataset: scanned(dataset))  # type: ignore[misc]
            for how in ("in order", "shuffled"):
                train = loaders[f"{name} {how}"]
                timed(f"{name} {how}", lambda train=train: sum(len(b["id"]) for b in train))  # type: ignore[misc]
            timed(f"{name} scanned again", lambda dataset=dataset: scanned(dataset))  # type: ignore[misc]
    return {what: times[1:] for what, times in took.items()}  # the first round warms the cache


def memory(folder: str) -> tuple[float, int, int]:
    """Return the bytes that a rank may hold, by which it grew, and of the whole set."""
    import psutil
    import pyarrow.dataset as ds

    import nbdist
    from nbdist.engine.data.reading import reader, reader_threads

    # One lane, so that the buffer is a small part of the set.
    train = nbdist.loader(folder, global_batch=BATCH, interleave=1)
    one = ds.dataset(sorted(ds.dataset(folder).files)[:1])
    for _ in one.to_batches():  # pyarrow's own threads and buffers
        pass
    me = psutil.Process()
    before, rss, total = me.memory_info().rss, 0, 0
    for nth, batch in enumerate(train):
        total += sum(column.nbytes for column in batch.values())
        if nth % 4 == 0:
            rss = max(rss, me.memory_info().rss)
    threads = reader_threads.wanted(False, reader_threads.own_cores())
    groups = 1 + reader.AHEAD + 1 + threads * DECODING  # the lane, those ahead, batches made
    return KEPT * groups * total / (FILES * GROUPS), rss - before, total


def first_batch(url: str, options: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds until a loader over an object store is made, and has given a batch."""
    import nbdist

    began = time.perf_counter()
    train = nbdist.loader(url, global_batch=BATCH, storage_options=options)
    made = time.perf_counter() - began
    next(iter(train))
    return made, time.perf_counter() - began


def read_again(folder: str) -> int:
    """Return how many row groups are read twice where an epoch is broken off and resumed."""
    import nbdist
    from nbdist.engine.data.sources.parquet import ParquetSource

    read: list[int] = []
    plain = ParquetSource.read

    def noted(self: ParquetSource, group: int) -> Any:
        read.append(group)
        return plain(self, group)

    ParquetSource.read = noted  # type: ignore[method-assign]
    try:
        train = nbdist.loader(folder, global_batch=BATCH)
        begun: set[int] = set()
        for nth, batch in enumerate(train):
            begun.update((batch["id"] // ROWS).tolist())
            if nth == SAMPLES // BATCH // 2:
                break
        state = train.state_dict()
        read.clear()
        train = nbdist.loader(folder, global_batch=BATCH)
        train.load_state_dict(state)
        for _ in train:
            pass
    finally:
        ParquetSource.read = plain  # type: ignore[method-assign]
    return len(begun & set(read))


def rows() -> list[Row]:
    """Return the figures of passes over files and tables, and of memory, first batch and resume."""
    from tests.group import s3_server
    from tests.group.engines import cluster

    found = []
    with tempfile.TemporaryDirectory() as root:
        folder, delta = Path(root) / "files", Path(root) / "delta"
        write(folder, delta)
        for ranks in (1, 2):
            with cluster(ranks) as running:
                if ranks == 1:  # before anything else has grown it
                    said, grown, total = running.run(memory, str(folder))[0]
                took = running.run(passes, str(folder), str(delta))[0]
                found += _of_passes(took, "1 rank" if ranks == 1 else "2 ranks together")
                again = running.run(read_again, str(folder))
        with s3_server.serve(Path(root) / "served") as server, cluster(2) as running:
            folder.rename(server.folder / "bucket" / "train")
            times = running.run(first_batch, "s3://bucket/train", server.options)
    return [
        *found,
        Row(
            f"growth of a rank over a set of {total / 1e6:.0f} MB, one lane",
            grown / 1e6,
            "MB",
            said / 1e6,
            "what is said",
            goal=MEMORY_GOAL,
        ),
        Row(
            "first batch from S3, 32 row groups, 2 ranks",
            max(first for _, first in times) * 1e3,
            "ms",
            goal=FIRST_GOAL_MS,
            goal_on="measured",
        ),
        Row(
            "row groups that a rank of 2 reads again by a resume",
            max(again),
            "",
            beside="one for each of its 8 lanes",
        ),
    ]


def _of_passes(took: dict[str, list[float]], where: str) -> list[Row]:
    found = []
    for name, title in (("files", "Parquet"), ("delta", "Delta")):
        noise = apart(took[f"{name} scanned again"], took[f"{name} scanned"])
        bare = min(took[f"{name} scanned"] + took[f"{name} scanned again"])
        for how, goal in (("in order", ORDERED_GOAL), ("shuffled", SHUFFLED_GOAL)):
            found.append(
                Row(
                    f"a pass over 2.1 million rows, {title} {how}, {where}",
                    min(took[f"{name} {how}"]) * 1e3,
                    "ms",
                    bare * 1e3,
                    "pyarrow's scan",
                    noise,
                    goal,
                )
            )
    return found
