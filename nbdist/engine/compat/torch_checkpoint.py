"""Tensors in the files of torch.distributed.checkpoint: planned, written, read.

Its own planner decides which rank writes what (replicas once, shared out by size), and its writer
and reader know the files; what they do between ranks is left out, for a save here runs no
collective in the background. `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`
reads the folders. `.metadata` is a pickle, as torch has it: whoever restores a folder trusts it.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`. Tried
with torch 2.13.0 (CPU). Threads: any; a plan belongs to one save.
"""

import io
import os
import pickle
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import IO, Any

import torch
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    planner_helpers,
)
from torch.distributed.checkpoint import _fsspec_filesystem as fsspec_files
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from nbdist.engine.compat.torch_groups import lacking

_SMALL_BYTES = 1 << 16
_TO_DISK_BYTES = 8 << 20  # of a file, after which the disk begins with them

_planning: Any = planner_helpers
_fsspec: Any = fsspec_files


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    missing = lacking(
        planner_helpers, ["create_read_items_for_chunk_list"], "checkpoint.planner_helpers"
    )
    missing += lacking(fsspec_files, ["FsspecReader", "FsspecWriter"], "_fsspec_filesystem")
    missing += lacking(DTensor, ["__create_chunk_list__"], "DTensor")
    missing += lacking(
        FileSystemWriter, ["prepare_global_plan", "write_data", "finish"], "FileSystemWriter"
    )
    return [f"torch {torch.__version__}: {what}" for what in missing]


# ---- Writing ------------------------------------------------------------------------------------


Spread = dict[str, tuple[object, ...]]


@dataclass
class WritePlan:
    """What one rank writes, and what all ranks together will have written."""

    mine: SavePlan
    metadata: Metadata

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return sum(_item_bytes(item) for item in self.mine.items)

    @property
    def total_bytes(self) -> int:
        """Bytes of the tensors that all ranks write."""
        found = self.metadata.state_dict_metadata.values()
        tensors = [one for one in found if isinstance(one, TensorStorageMetadata)]
        return sum(one.size.numel() * one.properties.dtype.itemsize for one in tensors)


class WritePlanner:
    """The tensors of one training state on this rank, as torch's planner sees them.

    Args:
        state: Nested dicts with text as keys; leaves are tensors, DTensors among them.
        rank: This rank.
    """

    def __init__(self, state: dict[str, Any], rank: int) -> None:
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(state, is_coordinator=rank == 0)
        self._rank = rank

    @cached_property
    def local(self) -> bytes:
        """This rank's part of the plan: what it has of which tensor. Costs milliseconds."""
        return pickle.dumps(self._planner.create_local_plan())

    def spread(self) -> "Spread":
        """Return how each tensor lies on the ranks: `local` follows from it. Costs little."""
        return {
            name: (
                tensor.shape,
                tensor.dtype,
                *((tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else ()),
            )
            for name, tensor in self._planner.state_dict.items()
        }

    def agree(self, every: Sequence[bytes], writer: "Writer") -> WritePlan:
        """Return what this rank writes, from `local` of every rank. The same on all of them."""
        plans, metadata = self._planner.create_global_plan([pickle.loads(one) for one in every])
        mine = writer.torchs.prepare_global_plan(plans)[self._rank]
        return WritePlan(self._planner.finish_plan(mine), metadata)

    def stage(
        self,
        plan: WritePlan,
        buffers: dict[Any, torch.Tensor],
        steady: Container[str] = (),
        *,
        at_once: bool = True,
    ) -> "Staged":
        """Copy what this rank writes into `buffers` on the CPU, which later saves use again.

        Args:
            plan: What it writes.
            buffers: Of the save before.
            steady: Names of tensors that stay as they are for a while.
            at_once: Whether these are copied at once too, or left for `Staged.copy_rest`.
        """
        staged = Staged(buffers)
        now = []
        for item in plan.mine.items:
            source: Any = self._planner.resolve_data(item)
            key = (item.index.fqn, item.index.offset)
            is_steady = item.index.fqn in steady
            if is_steady:
                staged.steady[key] = source.detach()
            if at_once or not is_steady:
                now.append((key, source.detach()))
        staged.copy(now)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return staged


class Staged:
    """Copies that a thread may write while training changes the tensors.

    Args:
        room: Where copies were; filled with those that are made.

    Attributes:
        steady: Tensors that stay as they are for a while, by name and offset.
    """

    def __init__(self, room: dict[Any, torch.Tensor]) -> None:
        self.steady: dict[Any, torch.Tensor] = {}
        self._copies: dict[Any, torch.Tensor] = {}
        self._sums: dict[Any, tuple[int, int]] = {}
        self._room = room

    def copy(self, sources: Iterable[tuple[Any, torch.Tensor]]) -> None:
        """Copy tensors, each with its name and offset."""
        for key, source in sources:
            buffer = self._room.get(key)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                on_gpu = source.device.type == "cuda"
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=on_gpu)
            self._copies[key] = buffer
            buffer.copy_(source, non_blocking=True)

    def copy_rest(self) -> int:
        """Copy the tensors that were left for later, and return how many. Any thread; once."""
        rest = [(key, source) for key, source in self.steady.items() if key not in self._copies]
        self.copy(rest)
        self._room.clear()
        self._room.update(self._copies)
        return len(rest)

    def sum_steady(self) -> None:
        """Remember sums of the steady tensors' bits: `.data` changes them, and no version tells."""
        self._sums = {key: _sum_bits(source) for key, source in self.steady.items()}

    def changed(self) -> str:
        """Return the name of a steady tensor that was changed before it was copied, or nothing."""
        moved = (k for k, was in self._sums.items() if _sum_bits(self._copies[k]) != was)
        return next((str(name) for name, _ in moved), "")

    def is_as_copied(self) -> bool:
        """Return whether no steady tensor differs from its copy. Reads all of them."""
        return all(torch.equal(source, self._copies[key]) for key, source in self.steady.items())

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        """Return the copy of an item of the plan; torch's writer calls it."""
        return self._copies[item.index.fqn, item.index.offset]


def _sum_bits(tensor: torch.Tensor) -> tuple[int, int]:
    """Return sums of a CPU tensor's bits, of whole words and of the rest, at the memory's speed."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    return int(raw[:whole].view(torch.int64).sum()), int(raw[whole:].sum())


@dataclass
class FileFacts:
    """How long a file is, and its CRC-32."""

    size: int = 0
    crc: int = 0

    def add(self, chunk: Any) -> None:
        """Count bytes that are written to the file."""
        self.size += memoryview(chunk).nbytes
        self.crc = zlib.crc32(chunk, self.crc)


@dataclass
class Written:
    """What one rank has written: torch's own results, and the files."""

    results: Any
    files: dict[str, FileFacts]


class Writer:
    """The files of one checkpoint folder.

    Args:
        url: The folder, a path or any URL that fsspec opens.
        is_local: Whether it is a path: files are then synced to the disk.
        options: For the library behind a URL.
        before_write: Called before each write, and may raise to end it.
    """

    def __init__(
        self,
        url: str,
        *,
        is_local: bool,
        options: Mapping[str, Any] = MappingProxyType({}),
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        kind: Any = FileSystemWriter if is_local else _fsspec.FsspecWriter
        self.torchs: Any = kind(url, sync_files=is_local, **options)
        self._files: dict[str, FileFacts] = {}
        self._before_write = before_write
        self._is_local = is_local
        self.torchs.fs = _CountedFiles(self.torchs.fs, self._open)

    def write(self, plan: WritePlan, staged: Staged) -> Written:
        """Write this rank's file."""
        results = self.torchs.write_data(plan.mine, staged).wait()
        return Written(results, dict(self._files))

    def finish(self, metadata: Metadata, every: Sequence[Written]) -> FileFacts:
        """Write `.metadata`, by which torch reads the files of all ranks. On one rank."""
        self.torchs.finish(metadata, [one.results for one in every])
        return self._files[".metadata.tmp"]

    @contextmanager
    def _open(self, open_file: Any, path: Any, mode: str) -> Iterator[Any]:
        name = str(path).rsplit("/", 1)[-1]
        facts = self._files[name] = FileFacts()
        with open_file(path, mode) as stream:
            descriptor = stream.fileno() if self._is_local else None
            counted = _CountedStream(stream, facts, self._before_write, descriptor)
            yield counted
            counted.flush()


class _CountedFiles:
    """torch's files, whose streams for writing are opened by `open_counted`."""

    def __init__(self, inner: Any, open_counted: Callable[..., Any]) -> None:
        self._inner = inner
        self._open_counted = open_counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_stream(self, path: Any, mode: str) -> Any:
        """Open a file."""
        return self._open_counted(self._inner.create_stream, path, mode)


class _CountedStream(io.RawIOBase):
    """A stream that counts what is written to it.

    torch writes each tensor in some forty pieces, nearly all of some bytes: those are joined.

    Args:
        stream: Where bytes go.
        facts: Where they are counted.
        before_write: As of `Writer`.
        descriptor: Of the file; None where there is none on this machine.
    """

    def __init__(
        self,
        stream: IO[bytes],
        facts: FileFacts,
        before_write: Callable[[], None],
        descriptor: int | None = None,
    ):
        super().__init__()
        self._stream, self._facts, self._before_write = stream, facts, before_write
        self._descriptor = descriptor
        self._small = bytearray()
        self._begun = 0  # bytes that the disk was told to begin with

    def write(self, chunk: Any) -> int:
        nbytes = memoryview(chunk).nbytes
        if nbytes < _SMALL_BYTES:
            self._small += chunk
        if nbytes >= _SMALL_BYTES or len(self._small) >= _SMALL_BYTES:
            self._pass_on_small()
        if nbytes >= _SMALL_BYTES:
            self._pass_on(chunk)
        return nbytes

    def _pass_on_small(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._pass_on(small)

    def _pass_on(self, chunk: Any) -> None:
        self._before_write()
        self._stream.write(chunk)
        self._facts.add(chunk)
        if self._descriptor is not None and self._facts.size > self._begun + _TO_DISK_BYTES:
            self._begin_on_disk(self._descriptor)

    def _begin_on_disk(self, descriptor: int) -> None:
        """Have the disk write what it has been given, beside what is still to come.

        Linux begins to write pages that it is told are not needed; by itself it would wait for
        the sync at the end, which then waits for all of them.
        """
        if hasattr(os, "posix_fadvise"):
            nbytes = self._facts.size - self._begun
            os.posix_fadvise(descriptor, self._begun, nbytes, os.POSIX_FADV_DONTNEED)
        self._begun = self._facts.size

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._facts.size + len(self._small)

    def fileno(self) -> int:
        """Return the file's, which torch asks for to sync it: all of it must be there."""
        self.flush()
        return self._stream.fileno()

    def flush(self) -> None:
        if not self._stream.closed:
            self._pass_on_small()
            self._stream.flush()

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
            finally:
                self._stream.close()
        super().close()


def _item_bytes(item: WriteItem) -> int:
    facts = item.tensor_data
    return 0 if facts is None else facts.chunk.sizes.numel() * facts.properties.dtype.itemsize


# ---- Reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """What is known of a tensor in the files: shape and dtype of the whole."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass
class WantedPart:
    """The part of a saved tensor that a rank wants: where it begins, and room for it."""

    offsets: tuple[int, ...]
    room: torch.Tensor


class Reader:
    """The tensors of one checkpoint folder; arguments as of `Writer`."""

    def __init__(
        self, url: str, *, is_local: bool, options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        kind: Any = FileSystemReader if is_local else _fsspec.FsspecReader
        self._torchs: Any = kind(url, **options)
        self._metadata: Metadata = self._torchs.read_metadata()
        self._torchs.set_up_storage_reader(self._metadata, is_coordinator=False)

    def tensors(self) -> dict[str, SavedTensor]:
        """Return what lies in the files, by its keys joined with dots."""
        return {
            key: SavedTensor(found.size, found.properties.dtype)
            for key, found in self._metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }

    def read(self, wanted: Mapping[str, Sequence[WantedPart]]) -> None:
        """Fill the room of each part, by key. No collective."""
        items = []
        for key, parts in wanted.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), p.room.shape) for p in parts]
            saved = self._metadata.state_dict_metadata[key]
            items += _planning.create_read_items_for_chunk_list(key, saved, chunks)
        self._torchs.read_data(LoadPlan(items), _IntoRoom(wanted)).wait()


@dataclass
class _IntoRoom:
    """Tells torch's reader where the parts it has read belong."""

    wanted: Mapping[str, Sequence[WantedPart]]

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        target: torch.Tensor = self.wanted[item.dest_index.fqn][item.dest_index.index].room
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, _item: object, _tensor: torch.Tensor) -> None:
        """Nothing more is to be done: the room has been filled."""

    def load_bytes(self, _item: object, _value: io.BytesIO) -> None:
        raise AssertionError("only tensors are asked for")


def part_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.Size]:
    """Return where in the whole this rank's part of a tensor begins, and its shape."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tensor.shape
    whole: Any = tensor
    (chunk,) = whole.__create_chunk_list__()
    return tuple(chunk.offsets), torch.Size(chunk.sizes)
