"""Bytes of contiguous tensors, of which one element may have any stride."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nbdist.engine.averaging import messages
from nbdist.engine.checkpoint import steady
from nbdist.engine.compat.checkpoints import tensor_bytes, tensor_frame
from nbdist.engine.layout.verify import preconditions
from nbdist.engine.layout.weights import safetensors_file
from nbdist.engine.recovery.clone import fingerprint
from nbdist.engine.recovery.snapshots import saved


def column() -> torch.Tensor:
    """Return a column of one row: contiguous, with the stride of the rows."""
    tensor = torch.arange(1.0, 18.0).reshape(1, 17)[:, 1]
    assert tensor.is_contiguous()
    assert tensor.stride() == (17,)
    return tensor


def test_the_bytes_are_those_where_the_tensor_lies() -> None:
    of_one = tensor_bytes.raw(column())
    assert bytes(of_one.numpy()) == bytes(torch.tensor([2.0]).view(torch.uint8).numpy())
    part = torch.arange(12, dtype=torch.int16).reshape(3, 4)[1:]
    assert tensor_bytes.flat(part).tolist() == list(range(4, 12))
    assert tensor_bytes.raw(part).data_ptr() == part.data_ptr()
    assert tensor_bytes.raw(torch.empty(0, 3)).shape == (0,)


USERS: list[Callable[[torch.Tensor], Any]] = [
    lambda tensor: messages._pack([tensor]).tolist(),
    steady._sum_of,
    lambda tensor: bytes(tensor_frame._bytes_of(tensor)),
    preconditions._digest,
    lambda tensor: bytes(safetensors_file.bytes_of(tensor)),
    lambda tensor: bytes(saved.bytes_of(tensor)),
    fingerprint.fingerprint,
]


@pytest.mark.parametrize("user", USERS)
def test_a_column_of_one_row_is_as_its_copy(user: Callable[[torch.Tensor], Any]) -> None:
    assert user(column()) == user(torch.tensor([2.0]))
