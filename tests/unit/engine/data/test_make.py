"""What a loader refuses, in words."""

from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pytest

from nbdist import UsageError
from nbdist.engine.data.make import loader

COLUMNS = {"a": [1, 2, 3], "b": [4, 5, 6]}


@pytest.mark.parametrize("data", [COLUMNS, pd.DataFrame(COLUMNS), pa.table(COLUMNS)])
def test_columns_in_memory_are_refused_with_the_way_to_rows(data: Any) -> None:
    with pytest.raises(UsageError, match=r"samples are rows[\s\S]*Parquet[\s\S]*from_pandas"):
        loader(data, global_batch=1)


def test_a_dict_by_index_is_a_dataset() -> None:
    assert len(list(loader({0: 1.0, 1: 2.0}, global_batch=1, shuffle=False))) == 2
