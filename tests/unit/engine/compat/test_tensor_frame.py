"""Tensors are written as torch.save writes them, the second of a kind in the frame of the first."""

import io
import zipfile
import zlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from nbdist.engine.compat.checkpoints.counted_stream import CountedStream, FileFacts, joined_crc
from nbdist.engine.compat.checkpoints.tensor_frame import Frames

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
SHAPES = [(), (1,), (3,), (6,), (40,), (160,), (5, 7), (300, 301), (0,), (0, 4)]


def written(*tensors: torch.Tensor, frames: Frames | None = None) -> list[bytes]:
    """Return the file of each tensor; size and checksum of all are compared with what is told."""
    content, facts = io.BytesIO(), FileFacts()
    stream, files = CountedStream(content, facts, lambda: None), []
    frames = Frames() if frames is None else frames
    for tensor in tensors:
        began = stream.tell()
        frames.write(tensor, stream)
        stream.flush()
        files.append(content.getvalue()[began : stream.tell()])
    assert (facts.size, facts.crc) == (len(content.getvalue()), zlib.crc32(content.getvalue()))
    return files


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(shape) * 100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_loads_each_of_a_kind_and_zip_finds_its_checksums_right(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors = [random(shape, dtype) for _ in range(3)]
    for tensor, file in zip(tensors, written(*tensors), strict=True):
        found = torch.load(io.BytesIO(file), weights_only=True)
        assert found.dtype == dtype
        assert found.shape == torch.Size(shape)
        assert torch.equal(found, tensor)
        assert zipfile.ZipFile(io.BytesIO(file)).testzip() is None


def test_torch_writes_one_of_a_kind_only() -> None:
    with mock.patch.object(torch, "save", side_effect=torch.save) as save:
        written(*(torch.rand(70, 80) for _ in range(5)), torch.rand(80, 70))
    assert save.call_count == 2


PARTS: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda t: t[1:3], lambda t: t[1, 1:]]


@pytest.mark.parametrize("part", PARTS)
def test_of_a_larger_tensor_a_part_alone_is_written(
    part: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    parts = [part(torch.rand(50, 31)).detach() for _ in range(2)]
    for tensor, file in zip(parts, written(*parts), strict=True):
        found = torch.load(io.BytesIO(file), weights_only=True)
        assert torch.equal(found, tensor)
        assert found.untyped_storage().nbytes() == tensor.nbytes


def test_without_checksums_of_torch_each_is_written_by_torch() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        tensors, frames = [torch.rand(7, 9) for _ in range(2)], Frames()
        for tensor, file in zip(tensors, written(*tensors, frames=frames), strict=True):
            assert torch.equal(torch.load(io.BytesIO(file), weights_only=True), tensor)
        assert len(frames) == 0
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 63, 4096, 100_001])
def test_checksums_of_two_pieces_give_that_of_both(nbytes: int) -> None:
    first, second = b"what comes first", bytes(range(256)) * (nbytes // 256 + 1)
    second = second[:nbytes]
    joined = joined_crc(zlib.crc32(first), zlib.crc32(second), nbytes)
    assert joined == zlib.crc32(first + second)
