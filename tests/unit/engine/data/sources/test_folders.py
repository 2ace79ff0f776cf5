"""Folders of Parquet and Arrow files, and pyarrow's datasets: what is read, and what is refused."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pa = pytest.importorskip("pyarrow")
import pyarrow.dataset as ds  # noqa: E402
import pyarrow.feather as feather  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from nbdist.engine.data.make import loader  # noqa: E402
from nbdist.engine.data.sources.open_source import open_source, paths_in  # noqa: E402
from nbdist.engine.data.sources.source import Source  # noqa: E402
from nbdist.shared.errors import DataError, NBDistError, UsageError  # noqa: E402


def write(folder: Path, files: int = 3, rows: int = 10, row_group: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    for n in range(files):
        ids = np.arange(n * rows, (n + 1) * rows)
        pq.write_table(pa.table({"id": ids, "x": ids / 2}), folder / f"{n}.parquet", row_group)
    return folder


def opened(data: Any, columns: list[str] | None = None) -> Source:
    source = open_source(data, columns, None)
    assert source is not None
    return source


def read(source: Source, column: str = "id") -> list[Any]:
    """Return a column of the whole source, group after group."""
    return [
        value for group in range(len(source.sizes)) for value in source.read(group)[column].tolist()
    ]


def error_of(data: Any, columns: list[str] | None = None) -> NBDistError:
    with pytest.raises(NBDistError) as caught:
        open_source(data, columns, None)
    return caught.value


def test_a_folder_has_its_row_groups_in_the_order_of_names(tmp_path: Path) -> None:
    source = opened(str(write(tmp_path / "data")))
    assert source.sizes.tolist() == [4, 4, 2] * 3
    assert read(source) == list(range(30))
    assert source.where(4) == "1.parquet, row group 1"


def test_a_pattern_a_list_and_a_file_are_read_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    assert read(opened(f"{folder}/[01].parquet")) == list(range(20))
    assert read(opened([f"{folder}/2.parquet", folder / "0.parquet"])) == [
        *range(20, 30),
        *range(10),
    ]
    assert read(opened(folder / "1.parquet")) == list(range(10, 20))


def test_hidden_files_are_no_data_and_a_marker_of_success_is_none(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", files=1)
    (folder / "_SUCCESS").touch()
    (folder / ".0.parquet.crc").touch()
    write(folder / "_temporary")
    assert read(opened(folder)) == list(range(10))


def test_folders_named_by_hive_give_columns(tmp_path: Path) -> None:
    for year, land in ((2024, "de"), (2025, "at")):
        folder = tmp_path / f"year={year}" / f"land={land}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [year]}), folder / "part.parquet")
    source = opened(tmp_path)
    assert read(source, "year") == [2024, 2025]
    assert [source.read(g)["land"].to_pylist() for g in range(2)] == [["de"], ["at"]]
    assert list(opened(tmp_path, ["year"]).read(1)) == ["year"]


def test_a_dataset_of_pyarrow_keeps_its_schema_and_partitions(tmp_path: Path) -> None:
    table = pa.table({"id": range(6), "part": ["a", "b"] * 3})
    ds.write_dataset(table, tmp_path / "t", format="parquet", partitioning=["part"])
    dataset = ds.dataset(tmp_path / "t", partitioning=["part"])
    source = opened(dataset)
    assert read(source) == [0, 2, 4, 1, 3, 5]
    assert source.read(1)["part"].to_pylist() == ["b"] * 3


def test_record_batches_of_arrow_files_are_groups(tmp_path: Path) -> None:
    for n in range(2):
        table = pa.table({"name": ["a", "b", "c"], "id": np.arange(n * 3, n * 3 + 3)})
        with pa.ipc.new_file(tmp_path / f"{n}.arrow", table.schema) as file:
            file.write_table(table, max_chunksize=2)
    source = opened(tmp_path)
    assert source.sizes.tolist() == [2, 1, 2, 1]
    assert read(source) == list(range(6))
    assert source.where(3) == "1.arrow, record batch 1"


def test_an_arrow_stream_is_refused_for_it_has_no_index(tmp_path: Path) -> None:
    table = pa.table({"id": [1]})
    with pa.ipc.new_stream(tmp_path / "0.arrow", table.schema) as file:
        file.write_table(table)
    assert "is no Arrow file with an index" in error_of(tmp_path).what


def test_a_source_travels_and_its_fingerprint_follows_the_data_not_the_place(
    tmp_path: Path,
) -> None:
    source, elsewhere = opened(write(tmp_path / "a")), opened(write(tmp_path / "b"))
    assert pickle.loads(pickle.dumps(source)).read(1)["id"].tolist() == [4, 5, 6, 7]
    assert source.fingerprint == elsewhere.fingerprint
    assert source.fingerprint != opened(write(tmp_path / "c", rows=11)).fingerprint
    assert source.fingerprint != opened(write(tmp_path / "d", row_group=5)).fingerprint


def test_what_is_not_there_is_told_in_words(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    (tmp_path / "empty").mkdir()
    assert error_of(tmp_path / "none").what == f"There is no {tmp_path}/none."
    assert error_of(f"{folder}/*.pq").what == f"No file matches {folder}/*.pq."
    assert error_of(tmp_path / "empty").what.startswith(f"{tmp_path}/empty has no .parquet or ")
    unknown = error_of(folder, ["id", "y"])
    assert (unknown.what, unknown.do) == (f"{folder} has no column 'y'.", "choose from id, x")
    assert isinstance(unknown, UsageError)


def test_a_hudi_table_is_read_by_its_base_files_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "table", files=2)
    (folder / ".hoodie").mkdir()
    assert (
        error_of(folder).what == f"{folder} is a Hudi table, whose timeline nbdist does not read."
    )
    assert read(opened([str(folder / "1.parquet")])) == list(range(10, 20))


def test_integers_in_one_file_and_floats_in_another_are_read_by_the_schema_that_is_named(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "data", files=1)
    pq.write_table(pa.table({"id": [10], "x": [7]}), folder / "1.parquet")
    refused = error_of(str(folder))
    assert refused.what == (
        "The files differ in column 'x': double in 0.parquet, int64 in 1.parquet."
    )
    assert "pyarrow.dataset.dataset(path, schema=...)" in refused.do
    schema = pa.schema({"id": pa.int64(), "x": pa.float64()})
    source = opened(ds.dataset(str(folder), schema=schema))
    assert read(source, "x") == [*(n / 2 for n in range(10)), 7.0]


def test_files_whose_schemas_differ_are_refused_by_name_and_column(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", files=2)
    pq.write_table(pa.table({"id": [1], "x": ["text"]}), folder / "2.parquet")
    error = error_of(folder)
    assert isinstance(error, DataError)
    assert error.what == (
        "The files differ in column 'x': double in 0.parquet, string in 2.parquet."
    )
    assert read(opened(folder, ["id"]))[-1] == 1


@pytest.mark.parametrize("write", [pq.write_table, feather.write_feather])
def test_empty_files_and_columns_of_nulls_are_of_the_type_of_others(
    tmp_path: Path, write: Callable[[Any, Path], None]
) -> None:
    # As pandas writes them: a column in which nothing stands has no type.
    ending = "parquet" if write is pq.write_table else "arrow"
    none = pa.table({"id": pa.array([], pa.int64()), "s": pa.nulls(0), "l": pa.nulls(0)})
    nulls = pa.table({"id": [0, 1], "s": pa.nulls(2), "l": pa.nulls(2)})
    filled = pa.table({"id": [2, 3], "s": ["a", "b"], "l": [[1.0], [2.0, 3.0]]})
    for n, table in enumerate([none, nulls, filled, nulls, none]):
        write(table, tmp_path / f"{n}.{ending}")
    source = opened(tmp_path)
    assert read(source) == [0, 1, 2, 3, 0, 1]
    assert [one.as_py() for one in source.read(0)["s"]] == [None, None]
    assert str(source.read(0)["l"].type) == str(source.read(1)["l"].type)
    (batch,) = loader(tmp_path, global_batch=6, shuffle=False)
    assert batch["s"] == [None, None, "a", "b", None, None]
    write(pa.table({"id": [4], "s": [5], "l": pa.nulls(1)}), tmp_path / f"5.{ending}")
    said = error_of(tmp_path).what
    assert said == f"The files differ in column 's': string in 2.{ending}, int64 in 5.{ending}."


def test_a_file_that_is_no_parquet_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    (folder / "1.parquet").write_bytes(b"nothing of the kind")
    assert error_of(folder).what == f"{folder}/1.parquet could not be read."


def test_a_missing_number_is_refused_with_its_column_and_row_group(tmp_path: Path) -> None:
    table = pa.table({"x": [1.5, None], "n": [1, None], "s": ["a", None]})
    pq.write_table(table, tmp_path / "0.parquet")
    (batch,) = loader(tmp_path, global_batch=2, columns=["x", "s"], shuffle=False)
    assert batch["x"].isnan().tolist() == [False, True]
    assert batch["s"] == ["a", None]
    with pytest.raises(DataError, match="Column 'n' has 1 nulls, and is int64"):
        next(iter(loader(tmp_path, global_batch=2)))


def test_lists_of_one_length_are_one_tensor_and_others_a_tensor_each(tmp_path: Path) -> None:
    table = pa.table(
        {
            "even": [[i, -i] for i in range(12)],
            "group": [[i] * (2 + i // 4) for i in range(12)],  # alike in each row group alone
            "some": [[i] * (3 if i < 4 else i % 3) for i in range(12)],
        }
    )
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=4)
    for batch_size in (3, 4, 12):
        for batch in loader(tmp_path, global_batch=batch_size, shuffle=True, interleave=3):
            numbers = batch["even"][:, 0].tolist()
            assert batch["even"].tolist() == [[i, -i] for i in numbers]
            assert [one.tolist() for one in batch["group"]] == [[i] * (2 + i // 4) for i in numbers]
            lengths = [3 if i < 4 else i % 3 for i in numbers]
            assert [one.tolist() for one in batch["some"]] == [
                [i] * n for i, n in zip(numbers, lengths, strict=True)
            ]


def test_texts_are_paths_only_where_they_look_so() -> None:
    assert paths_in("data") == ["data"]
    assert paths_in(["s3://bucket/a", "b.parquet"]) == ["s3://bucket/a", "b.parquet"]
    assert paths_in(["a sentence", "another"]) == []
    assert paths_in([1, 2]) == paths_in([]) == []
