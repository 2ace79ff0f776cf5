"""Tensors in the files of torch.distributed.checkpoint: planned, written, read.

Its own planner decides which rank writes what (replicas once, shared out by size), and its reader
knows the files; what they do between ranks is left out, for a save here runs no
collective in the background. `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`
reads the folders. `.metadata` is a pickle, as torch has it: whoever restores a folder trusts it.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`. Tried
with torch 2.13.0 (CPU). Threads: any; a plan belongs to one save.
"""

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    filesystem,
    planner_helpers,
)
from torch.distributed.checkpoint import _fsspec_filesystem as fsspec_files
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from nbdist.engine.compat.checkpoints import tensor_frame
from nbdist.engine.compat.checkpoints.counted_stream import CountedStream, FileFacts
from nbdist.engine.compat.lacking import lacking

_planning: Any = planner_helpers
_fsspec: Any = fsspec_files
_files_of_torch: Any = filesystem


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    missing = lacking(
        planner_helpers, ["create_read_items_for_chunk_list"], "checkpoint.planner_helpers"
    )
    missing += lacking(fsspec_files, ["FsspecReader", "FsspecWriter"], "_fsspec_filesystem")
    missing += lacking(DTensor, ["__create_chunk_list__"], "DTensor")
    missing += lacking(FileSystemWriter, ["prepare_global_plan", "finish"], "FileSystemWriter")
    missing += lacking(filesystem, ["_StorageInfo"], "checkpoint.filesystem")
    return [f"torch {torch.__version__}: {what}" for what in missing]


# ---- Writing ------------------------------------------------------------------------------------


Spread = dict[str, tuple[object, ...]]
TensorKey = tuple[str, tuple[int, ...] | None]  # a name, and where in the whole a part begins


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

    def sources(self, plan: WritePlan) -> list[tuple[TensorKey, torch.Tensor]]:
        """Return what this rank writes: parts of its tensors, each with its name and offset."""
        with torch.no_grad():  # with gradients a DTensor's part costs ten times as much
            found: Any = [(_key_of(i), self._planner.resolve_data(i)) for i in plan.mine.items]
        return [(key, source.detach()) for key, source in found]


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

    def write(self, plan: WritePlan, read: Mapping[TensorKey, torch.Tensor]) -> Written:
        """Write this rank's file, as torch's writer does it.

        Args:
            plan: What is written.
            read: Parts of tensors on the CPU, as `WritePlanner.sources` names them.
        """
        file = f"{plan.mine.storage_data.prefix}0.distcp"
        path, results = self.torchs.fs.concat_path(self.torchs.path, file), []
        with self.torchs.fs.create_stream(path, "wb") as stream:
            for item in plan.mine.items:
                began = stream.tell()
                tensor_frame.here.write(read[_key_of(item)], stream)
                nbytes = stream.tell() - began
                place = _files_of_torch._StorageInfo(file, began, nbytes)
                results.append(WriteResult(item.index, nbytes, place))
            if self._is_local:
                os.fsync(stream.fileno())
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
            counted = CountedStream(stream, facts, self._before_write, descriptor)
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


def _key_of(item: WriteItem) -> TensorKey:
    return item.index.fqn, item.index.offset


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
