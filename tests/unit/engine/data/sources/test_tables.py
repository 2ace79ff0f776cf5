"""Delta and Iceberg tables, written by their own libraries."""

import base64
import json
import struct
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pa = pytest.importorskip("pyarrow")
deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")
import pyarrow.parquet as pq  # noqa: E402
from pyiceberg.catalog.sql import SqlCatalog  # noqa: E402
from pyiceberg.io.pyarrow import PyArrowFileIO  # noqa: E402
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat  # noqa: E402
from pyiceberg.types import IntegerType  # noqa: E402

from nbdist.engine.data.sources import iceberg, urls  # noqa: E402
from nbdist.engine.data.sources.open_source import open_source  # noqa: E402
from nbdist.engine.data.sources.source import Source  # noqa: E402
from nbdist.shared.errors import DataError, UsageError  # noqa: E402


def opened(data: Any, columns: list[str] | None = None) -> Source:
    source = open_source(data, columns, None)
    assert source is not None
    return source


def read(source: Source) -> dict[str, list[Any]]:
    """Return all columns of the whole source, group after group."""
    groups = [source.read(group) for group in range(len(source.sizes))]
    assert [len(next(iter(group.values()))) for group in groups] == source.sizes.tolist()
    return {
        name: [v for g in groups for v in (g[name].tolist() if hasattr(g[name], "tolist") else [])]
        for name in groups[0]
    }


def write_delta(folder: Path) -> str:
    """Write versions 0 (partitioned), 1 (with another column) and 2 (with rows deleted)."""
    url = str(folder)
    first = pa.table({"id": np.arange(10), "day part": ["a/b", "c"] * 5})
    deltalake.write_deltalake(url, first, partition_by=["day part"])
    more = pa.table({"id": np.arange(10, 14), "day part": ["c"] * 4, "x": np.arange(4) / 2})
    deltalake.write_deltalake(url, more, mode="append", schema_mode="merge")
    deltalake.DeltaTable(url).delete("id = 3 OR id = 12")
    return url


def test_a_delta_tables_newest_version_is_read_with_partitions_and_added_columns(
    tmp_path: Path,
) -> None:
    source = opened(write_delta(tmp_path / "t"))
    found = read(source)
    assert sorted(found["id"]) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 13]
    by_id = dict(zip(found["id"], zip(found["day part"], found["x"], strict=True), strict=True))
    assert by_id[0][0] == "a/b"
    assert by_id[13] == ("c", 1.5)
    assert np.isnan(by_id[1][1])
    assert source.name.endswith("version 2")


def test_a_delta_table_stays_at_the_version_that_it_was_opened_at(tmp_path: Path) -> None:
    url = write_delta(tmp_path / "t")
    old = opened(deltalake.DeltaTable(url, version=0), ["id"])
    assert sorted(read(old)["id"]) == list(range(10))
    newest = opened(url, ["id"])
    deltalake.write_deltalake(url, pa.table({"id": [99]}), mode="append", schema_mode="merge")
    assert 99 not in read(newest)["id"]
    assert opened(url, ["id"]).fingerprint != newest.fingerprint


def test_a_delta_version_whose_files_were_vacuumed_says_so(tmp_path: Path) -> None:
    url = write_delta(tmp_path / "t")
    old = deltalake.DeltaTable(url, version=0)
    deltalake.DeltaTable(url).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(DataError) as caught:
        opened(old)
    assert caught.value.what.endswith(".parquet is not there.")
    assert "vacuum" in caught.value.do


def test_rows_in_a_delta_tables_deletion_vectors_are_left_out(tmp_path: Path) -> None:
    url = str(tmp_path / "t")
    table = pa.table({"id": np.arange(20)})
    properties = deltalake.WriterProperties(max_row_group_size=8)
    deltalake.write_deltalake(url, table, writer_properties=properties)
    _delete_by_vector(Path(url), [2, 3, 9, *range(16, 20)])
    source = opened(url)
    assert source.sizes.tolist() == [6, 7]  # the third row group is empty
    assert read(source)["id"] == [0, 1, 4, 5, 6, 7, 8, *range(10, 16)]


def _delete_by_vector(folder: Path, rows: list[int]) -> None:
    """Write the next version as Spark does: deltalake reads deletion vectors, and writes none."""
    from pyroaring import BitMap64

    log = folder / "_delta_log"
    actions = [json.loads(line) for line in (log / f"{0:020}.json").read_text().splitlines()]
    add = next(action["add"] for action in actions if "add" in action)
    vector = struct.pack("<i", 1681511377) + BitMap64(rows).serialize()
    vector += b"\0" * (-len(vector) % 4)
    kept = {
        "storageType": "i",
        "pathOrInlineDv": _z85(vector),
        "sizeInBytes": len(vector),
        "cardinality": len(rows),
    }
    features = {"minReaderVersion": 3, "minWriterVersion": 7}
    lists = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    version = [
        {"protocol": {**features, **lists}},
        {"remove": {"path": add["path"], "dataChange": True, "deletionTimestamp": 1}},
        {"add": {**add, "deletionVector": kept}},
    ]
    (log / f"{1:020}.json").write_text("\n".join(map(json.dumps, version)))


def _z85(data: bytes) -> str:
    ours = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    return base64.b85encode(data).decode().translate(str.maketrans(ours, z85))


@pytest.fixture
def catalog(tmp_path: Path) -> Any:
    made = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}/w")
    made.create_namespace("n")
    yield made
    made.close()


def test_an_iceberg_tables_snapshot_is_read_with_columns_renamed_and_added(catalog: Any) -> None:
    first = pa.table({"id": np.arange(5), "x": np.arange(5) / 2})
    table = catalog.create_table("n.t", schema=first.schema)
    table.append(first)
    with table.update_schema() as change:
        change.rename_column("x", "price")
    with table.update_schema() as change:
        change.add_column("x", IntegerType())  # another column, of an old name
    schema = table.schema().as_arrow()
    table.append(pa.table([[5], [9.0], [7]], schema=schema))
    source = opened(table, ["id", "price"])
    found = read(source)
    assert sorted(zip(found["id"], found["price"], strict=True)) == [
        *((i, i / 2) for i in range(5)),
        (5, 9.0),
    ]
    assert source.name == f"n.t snapshot {table.current_snapshot().snapshot_id}"
    table.append(pa.table([[6], [1.0], [1]], schema=schema))
    assert sorted(read(source)["id"]) == list(range(6))
    with pytest.raises(DataError, match="Column 'x' has 5 nulls"):
        [opened(table, ["x"]).read(group) for group in range(3)]


def test_an_iceberg_table_is_read_by_partitions_of_any_type(catalog: Any) -> None:
    days = [date(2026, 1, 1), date(2026, 1, 2)] * 2
    rows = pa.table({"id": np.arange(4), "day": days, "share": np.arange(4) % 2 / 2})
    table = catalog.create_table("n.days", schema=rows.schema)
    with table.update_spec() as change:
        change.add_identity("day")
        change.add_identity("share")
    table.append(rows)
    found = read(opened(table, ["id", "day", "share"]))
    nanoseconds = np.array(days, "datetime64[ns]").tolist()
    assert sorted(zip(found["id"], found["day"], found["share"], strict=True)) == [
        (i, nanoseconds[i], i % 2 / 2) for i in range(4)
    ]


def test_what_to_do_of_a_file_that_is_gone_is_not_said_of_another_error() -> None:
    gone = "load the table again"
    assert urls.reason(FileNotFoundError(), "a", gone).do.startswith(gone)
    assert "let this account read it" in urls.reason(PermissionError("no"), "a", gone).do
    assert "write or copy it once more" in urls.reason(ValueError("no"), "a", gone).do


def test_an_iceberg_table_without_rows_is_refused(catalog: Any) -> None:
    table = catalog.create_table("n.t", schema=pa.schema([("id", pa.int64())]))
    with pytest.raises(DataError, match=r"n\.t is empty: it has no snapshot"):
        opened(table)


def test_positions_that_iceberg_deletes_are_found_and_other_deletes_refused(tmp_path: Path) -> None:
    path, other = "file:///data/a.parquet", "file:///data/b.parquet"
    rows = pa.table({"file_path": [path, other, path], "pos": [7, 1, 2]})
    pq.write_table(rows, tmp_path / "deletes.parquet")

    def delete(content: DataFileContent) -> DataFile:
        name = f"file://{tmp_path}/deletes.parquet"
        return DataFile.from_args(
            content=content, file_path=name, file_format=FileFormat.PARQUET, partition=()
        )

    deleted = iceberg.PositionDeletes(PyArrowFileIO())
    found = deleted.of(path, [delete(DataFileContent.POSITION_DELETES)])
    assert found is not None
    assert found.tolist() == [2, 7]
    with pytest.raises(UsageError, match="equality deletes in PARQUET format"):
        deleted.of(path, [delete(DataFileContent.EQUALITY_DELETES)])
    (tmp_path / "deletes.parquet").unlink()  # it is not read for each data file again
    found = deleted.of(other, [delete(DataFileContent.POSITION_DELETES)])
    assert found is not None
    assert found.tolist() == [1]
    assert deleted.of(other, []) is None
