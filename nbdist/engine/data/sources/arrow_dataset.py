"""pyarrow's own datasets of Parquet files as sources. While a loader is made."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from nbdist.engine.data.sources import urls
from nbdist.engine.data.sources.parquet import DataFile, ParquetSource
from nbdist.shared.errors import UsageError


def open_dataset(dataset: Any, columns: Sequence[str] | None) -> ParquetSource:
    """Return the row groups of a pyarrow.dataset.Dataset. Collective.

    Args:
        dataset: Of files, the same on all ranks; its schema counts, and files may lack columns.
        columns: Those to read; None for all.

    Raises:
        UsageError: It is in memory, of another format, or has a filter.
    """
    import pyarrow.dataset as ds
    from fsspec.implementations.arrow import ArrowFSWrapper  # type: ignore[import-untyped]

    if not isinstance(dataset, ds.FileSystemDataset) or dataset.format.default_extname != "parquet":
        raise UsageError(
            f"nbdist.loader reads pyarrow datasets of Parquet files, and this is "
            f"{type(dataset).__name__}.",
            why="rows are counted by Parquet's footers, before anything is read",
            do="give the files' folder, or write what is filtered to a folder first",
        )
    fs: Any = ArrowFSWrapper(dataset.filesystem)
    open_file = urls.open_file
    if dataset.filesystem.type_name == "local":
        fs, _ = urls.filesystem("/")
    files = [
        DataFile(
            fragment.path,
            fragment.path,
            int(fs.size(fragment.path)),
            _constants(ds.get_partition_keys(fragment.partition_expression), dataset.schema),
        )
        for fragment in dataset.get_fragments()
    ]
    name = f"a dataset of {len(files)} files"
    is_far = not urls.is_local(fs)
    return ParquetSource(
        name, partial(open_file, fs), files, columns, dataset.schema, is_far=is_far
    )


def _constants(keys: dict[str, Any], schema: Any) -> dict[str, Any]:
    import pyarrow as pa

    return {name: pa.scalar(value, schema.field(name).type) for name, value in keys.items()}
