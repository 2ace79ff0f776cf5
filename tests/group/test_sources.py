"""Loaders over files and tables on real ranks: every sample once, from anywhere, on any number."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest

from tests.group import s3_server, servers
from tests.group.harness import run_ranks
from tests.group.s3_server import Server

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

RANKS = "tests.group.source_ranks:"
ROWS = 400


def table(first: int = 0, rows: int = ROWS) -> Any:
    ids = np.arange(first, first + rows)
    return pa.table({"id": ids, "text": [str(i) for i in ids]})


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "data").mkdir()
    for n, rows in enumerate((150, 130, 120)):
        path = tmp_path / "data" / f"{n}.parquet"
        pq.write_table(table((0, 150, 280)[n], rows), path, row_group_size=17)
    return str(tmp_path / "data")


def together(per_rank: list[list[list[int]]]) -> list[list[int]]:
    """Return the global batches, from each rank's parts of them."""
    return [[i for part in parts for i in part] for parts in zip(*per_rank, strict=True)]


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def test_a_folder_is_read_once_an_epoch_in_batches_that_no_number_of_ranks_changes(
    folder: str,
) -> None:
    three = run_ranks(3, RANKS + "epochs", folder, 2, {"num_workers": 1})
    (alone,) = run_ranks(1, RANKS + "epochs", folder, 2, {})
    for epoch in range(2):
        batches = together([rank[epoch] for rank in three])
        assert batches == alone[epoch]
        assert sorted(flat(batches)) == list(range(ROWS))
    assert alone[0] != alone[1]


def test_a_state_of_four_ranks_goes_on_with_three_in_mid_epoch(folder: str) -> None:
    (alone,) = run_ranks(1, RANKS + "epochs", folder, 2, {})
    stopped = run_ranks(4, RANKS + "stop_after", folder, 6, 1)
    states = [state for _, state in stopped]
    assert states[0]["consumed"] == 6 * 24  # what loops were given, not what was read ahead
    rest = run_ranks(3, RANKS + "go_on", folder, states[0], {"interleave": 4})
    seen = together([part for part, _ in stopped]) + together(rest)
    assert flat(seen) == flat(alone[1])


def test_a_resume_on_changed_files_and_what_is_not_there_are_one_error_on_all_ranks(
    folder: str,
) -> None:
    ((_, state),) = run_ranks(1, RANKS + "stop_after", folder, 2, 0)
    pq.write_table(table(280, 120), f"{folder}/2.parquet", row_group_size=30)
    changed = run_ranks(2, RANKS + "error_of", folder, state)
    assert changed[0].startswith(f"DataError: {folder} is not the data that the state was taken ")
    assert changed[0] == changed[1]
    Path(folder, "1.parquet").write_bytes(b"no Parquet")
    first, second = run_ranks(2, RANKS + "error_of", folder)
    assert first == second
    assert first.startswith(f"DataError: {folder}/1.parquet could not be read (on rank 1).")


@pytest.mark.slow
def test_ranks_that_must_share_row_groups_are_told_so_once(folder: str) -> None:
    first, second = run_ranks(2, RANKS + "warnings_of", folder, 1)
    (told,) = first
    assert told.startswith("2 ranks share the samples of 1 row group at a time")
    assert second == []
    assert run_ranks(2, RANKS + "warnings_of", folder, 2) == [[], []]


def test_transforms_draw_the_same_numbers_on_any_number_of_ranks_and_workers(folder: str) -> None:
    (alone,) = run_ranks(1, RANKS + "draws", folder, 0)
    two = run_ranks(2, RANKS + "draws", folder, 2)
    for data, count in (("files", ROWS), ("items", 48)):
        assert sorted(alone[data]) == sorted(two[0][data] + two[1][data])
        assert len({number for _, *numbers in alone[data] for number in numbers}) == 3 * count
    assert alone["kept"]


def test_delta_and_iceberg_tables_are_read_once_over_two_ranks(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    sql = pytest.importorskip("pyiceberg.catalog.sql")
    url = str(tmp_path / "delta")
    for first in (0, 200):
        deltalake.write_deltalake(url, table(first, 200), mode="append")
    deltalake.DeltaTable(url).delete("id < 10")
    where = f"sqlite:///{tmp_path}/c.db", f"file://{tmp_path}/warehouse"
    catalog = sql.SqlCatalog("c", uri=where[0], warehouse=where[1])
    catalog.create_namespace("n")
    iceberg = catalog.create_table("n.t", schema=table().schema)
    for first in (0, 200):
        iceberg.append(table(first, 200))
    catalog.close()
    of_delta = run_ranks(2, RANKS + "epochs", url, 1, {})
    assert sorted(flat(together([rank[0] for rank in of_delta]))) == list(range(10, ROWS))
    of_iceberg = run_ranks(2, RANKS + "iceberg", *where, 1)
    assert sorted(flat(together([rank[0] for rank in of_iceberg]))) == list(range(ROWS))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with s3_server.serve(tmp_path / "served") as running:
        yield running


@pytest.mark.slow
def test_files_and_a_delta_table_in_s3_are_read_once_over_two_ranks(
    server: Server, folder: str
) -> None:
    deltalake = pytest.importorskip("deltalake")
    bucket = server.folder / "bucket"
    Path(folder).rename(bucket / "train")
    deltalake.write_deltalake(str(bucket / "table"), table())
    how = {"storage_options": server.options}
    for name in ("train", "table"):
        ranks = run_ranks(2, RANKS + "epochs", f"s3://bucket/{name}", 1, how)
        assert sorted(flat(together([rank[0] for rank in ranks]))) == list(range(ROWS))


def test_tars_in_s3_are_read_by_range_once_over_two_ranks(server: Server) -> None:
    for first in (0, 40):
        with tarfile.open(server.folder / "bucket" / f"{first:03}.tar", "w") as tar:
            for n in range(first, first + 40):
                about = tarfile.TarInfo(f"{n:03}.id")
                about.size = len(text := str(n).encode())
                tar.addfile(about, io.BytesIO(text))
    how = {"storage_options": server.options, "columns": ["id"]}
    ranks = run_ranks(2, RANKS + "epochs", "s3://bucket/*.tar", 1, how)
    assert sorted(flat(together([rank[0] for rank in ranks]))) == list(range(80))


@pytest.mark.slow  # 10 s
@pytest.mark.parametrize(("protocol", "serve"), [("gs", servers.gcs), ("abfs", servers.azure)])
def test_files_in_gcs_and_azure_are_read_once_over_two_ranks(
    protocol: str, serve: Any, folder: str, tmp_path: Path
) -> None:
    with serve(tmp_path) as options:
        fs, _ = fsspec.core.url_to_fs(f"{protocol}://bucket", **options)
        for path in Path(folder).iterdir():
            fs.pipe_file(f"bucket/train/{path.name}", path.read_bytes())
        how = {"storage_options": options}
        ranks = run_ranks(2, RANKS + "epochs", f"{protocol}://bucket/train", 1, how)
    assert sorted(flat(together([rank[0] for rank in ranks]))) == list(range(ROWS))
