"""Files of safetensors: their contents, and reads of a box of a tensor into existing memory.

A file is 8 bytes of the header's length, the header (JSON: by name dtype, shape and where the bytes
lie), and the bytes. Tensors are read by plain reads at offsets, a few MiB at a time: the library of
that name maps files into memory, and mapped pages count as a process's own. Any thread.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbdist.engine.compat.checkpoints import tensor_bytes
from nbdist.shared.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}
_READ_BYTES = 1 << 20  # read at once, where bytes cannot go straight to their place
_MOST_HEADER = 100 << 20  # bytes, as the library has it
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file: its first byte is at `begin`."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def stored_in(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name.

    Raises:
        CheckpointError: It is missing, cut off, or no such file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_MOST_HEADER, size - _LENGTH_BYTES):
                raise _broken(path, f"its {size:,} bytes do not begin with a header")
            header = json.loads(file.read(length))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise _broken(path, "its header cannot be read") from error
    return dict(_stored(path, header, _LENGTH_BYTES + length, size))


def _stored(path: Path, header: Any, data: int, size: int) -> Iterator[tuple[str, StoredTensor]]:
    """Yield what a header names, once it is known to lie within the file."""
    if not isinstance(header, dict):
        raise _broken(path, "its header cannot be read")
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        try:
            word, shape = facts["dtype"], tuple(int(n) for n in facts["shape"])
            begin, end = facts["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise _broken(path, f"its header does not say where {name} is") from error
        if word not in _DTYPES:
            raise CheckpointError(
                f"{name} in {path} has the dtype {word}, which nbdist does not read.",
                do=f"convert it to one of {', '.join(_DTYPES)}",
            )
        if data + end > size:
            raise _broken(path, f"it has {size:,} bytes, and {name} ends at {data + end:,}")
        dtype = _DTYPES[word]
        if end - begin != math.prod(shape) * dtype.itemsize or min((begin, *shape)) < 0:
            raise _broken(path, f"{name} has another size than its shape {shape} says")
        yield name, StoredTensor(path, dtype, shape, data + begin)


def header_of(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the header of a file whose tensors are stored end to end in this order.

    Raises:
        CheckpointError: There is no word for a dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _WORDS:
            raise CheckpointError(
                f"{name} is {dtype}, for which files of safetensors have no word.",
                do="layout.state_dict() and torch.save take any dtype",
            )
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        offsets = [begin, end]
        header[name] = {"dtype": _WORDS[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_box(file: int, stored: StoredTensor, offsets: Sequence[int], target: torch.Tensor) -> None:
    """Fill `target` with a part of a stored tensor: that which begins at `offsets`. No collective.

    Where dtype and place fit, bytes go straight into the target; else through a MiB of room.

    Args:
        file: A descriptor of the file.
        stored: The stored tensor.
        offsets: The first index in each dim.
        target: Of the part's shape; on any device, of any dtype.

    Raises:
        OSError: The file cannot be read, or has become shorter.
    """
    if not target.numel():
        return
    if not stored.shape:
        target.copy_(_read(file, stored, stored.begin, 1).view(()))
        return
    strides = [math.prod(stored.shape[dim + 1 :]) for dim in range(len(stored.shape))]
    _read_dim(file, stored, stored.begin, strides, list(offsets), target)


def _read_dim(
    file: int,
    stored: StoredTensor,
    begin: int,
    strides: Sequence[int],
    offsets: Sequence[int],
    target: torch.Tensor,
) -> None:
    """Fill `target`, whose first dim lies from byte `begin` on, in steps of `strides[0]` numbers.

    As many rows at once as fit the room; a row that does not fit is read dim by dim.
    """
    itemsize, shape = stored.dtype.itemsize, stored.shape[len(stored.shape) - target.ndim :]
    row_bytes = strides[0] * itemsize
    begin += offsets[0] * row_bytes
    is_whole_row = tuple(target.shape[1:]) == shape[1:]
    if is_whole_row and target.dtype == stored.dtype and _is_plain(target):
        _read_into(file, begin, target)
        return
    if row_bytes > _READ_BYTES and target.ndim > 1:
        for row in range(len(target)):
            _read_dim(file, stored, begin + row * row_bytes, strides[1:], offsets[1:], target[row])
        return
    inside = tuple(
        slice(start, start + size)
        for start, size in zip(offsets[1:], target.shape[1:], strict=True)
    )
    rows = max(1, _READ_BYTES // row_bytes)
    for first in range(0, len(target), rows):
        count = min(rows, len(target) - first)
        strip = _read(file, stored, begin + first * row_bytes, count * strides[0])
        strip = strip.view(count, *shape[1:])
        target[first : first + count].copy_(strip[(slice(None), *inside)])


def _is_plain(target: torch.Tensor) -> bool:
    return target.device.type == "cpu" and target.is_contiguous()


def _read(file: int, stored: StoredTensor, begin: int, numbers: int) -> torch.Tensor:
    """Return so many numbers from byte `begin` on, in one dim."""
    room = torch.empty(numbers, dtype=stored.dtype)
    _read_into(file, begin, room)
    return room


def _read_into(file: int, begin: int, target: torch.Tensor) -> None:
    left = memoryview(bytes_of(target))
    while left:
        count = os.preadv(file, [left], begin)
        if not count:
            raise OSError("the file ends before the tensor does")
        left, begin = left[count:], begin + count


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return the memory of a contiguous tensor on the CPU, as an array of bytes."""
    return tensor_bytes.raw(tensor).numpy()


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error of a file that cannot be read."""
    return CheckpointError(
        f"{path} cannot be read: {error.strerror or error}.",
        why="every rank reads its own parts of the weights",
        do="put the folder where all ranks can read it",
    )


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no whole file of safetensors: {why}.",
        do="copy or download it again",
    )
