"""What is counted of a checkpoint's file, and when it is there."""

import os
import zlib
from pathlib import Path

import torch

from nbdist.engine.compat.checkpoints.torch_checkpoint import WritePlanner, Writer


def test_pieces_of_any_size_are_counted_and_whole_in_the_file(tmp_path: Path) -> None:
    writer = Writer(str(tmp_path), is_local=True)
    pieces: list[bytes | memoryview] = [
        b"head",
        os.urandom(20 << 20),
        b"",
        b"x" * 70_000,
        memoryview(b"tail"),
    ]
    with writer.torchs.fs.create_stream(tmp_path / "file", "wb") as stream:
        assert [stream.write(piece) for piece in pieces] == [len(piece) for piece in pieces]
        assert stream.tell() == sum(len(piece) for piece in pieces)
    facts, whole = writer._files["file"], b"".join(pieces)
    assert (tmp_path / "file").read_bytes() == whole
    assert (facts.size, facts.crc) == (len(whole), zlib.crc32(whole))


def test_what_is_synced_is_all_that_was_written(tmp_path: Path) -> None:
    writer = Writer(str(tmp_path), is_local=True)
    with writer.torchs.fs.create_stream(tmp_path / "file", "wb") as stream:
        stream.write(b"small")
        assert os.fstat(stream.fileno()).st_size == 5


def test_tensors_that_lie_alike_have_the_same_plan_and_others_do_not() -> None:
    def planner(*shape: int) -> WritePlanner:
        return WritePlanner({"model": {"weight": torch.zeros(shape)}}, 0)

    assert planner(2, 3).spread() == planner(2, 3).spread()
    assert planner(2, 3).local == planner(2, 3).local
    assert planner(2, 3).spread() != planner(3, 2).spread()
