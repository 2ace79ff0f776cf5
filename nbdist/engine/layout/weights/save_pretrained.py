"""Write a layout's weights into files of safetensors, one at a time.

Each weight is put together on all ranks, and rank 0 appends it to a file whose header it has
written before, for shapes are known: no rank needs memory for more than one whole weight. Files get
their names when all of them are complete.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.kernel.agreement import each, from_rank_0
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.layout.weights.full_tensors import LayoutFacts, TensorFacts
from nbdist.engine.layout.weights.pretrained_folder import INDEX, SINGLE
from nbdist.engine.layout.weights.safetensors_file import bytes_of, header_of
from nbdist.shared.errors import CheckpointError

_PARTIAL = ".partial"  # what a file ends in until all are complete


@dataclass(frozen=True, slots=True)
class _Plan:
    """The tensors of each file, by its name, in the order in which they are written."""

    files: dict[str, dict[str, TensorFacts]]
    metadata: dict[str, str]


def save(
    spread: LayoutFacts,
    plain: nn.Module,
    folder: Path,
    file_bytes: int,
    describe: Callable[[Path], None],
) -> None:
    """Write the weights and saved buffers of a layout. Collective.

    Args:
        spread: The layout of the weights.
        plain: Its skeleton, which knows what is tied.
        folder: Made on rank 0 where it is not there; its former weights are replaced.
        file_bytes: The most bytes of a file, but of one with a single weight.
        describe: Called on rank 0 last, with the folder: writes what else belongs there.

    Raises:
        CheckpointError: A dtype has no word, or rank 0 could not write; the same on all ranks.
    """
    table = {n: facts for n, facts in full_tensors.table(spread).items() if facts.is_saved}
    plan = from_rank_0(lambda: _planned(table, plain, file_bytes))
    failed: Exception | None = None
    written: list[Path] = []
    tensors = (item for item in full_tensors.tensors(spread) if item[0] in table)
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(plan, folder, tensors, written)
        except Exception as error:
            failed = error
    for _ in tensors:
        pass  # other ranks send theirs, even if rank 0 cannot write

    def commit() -> None:
        try:
            if failed is not None:
                raise failed
            _commit(plan, folder)
        except OSError as error:
            raise _not_written("The weights were", folder, error, "what was there") from error
        finally:
            for path in written:
                path.unlink(missing_ok=True)
        try:
            describe(folder)
        except OSError as error:
            what = "The weights were written, but what describes them was"
            raise _not_written(what, folder, error, "a configuration that was there") from error

    each(lambda: commit() if dist.get_rank() == 0 else None)


def _not_written(what: str, folder: Path, error: OSError, kept: str) -> CheckpointError:
    return CheckpointError(
        f"{what} not written to {folder}: {error.strerror or error}.",
        why=f"rank 0 writes them; {kept} is as it was",
        do="give a folder with room, where rank 0 may write",
    )


def _planned(table: Mapping[str, TensorFacts], plain: nn.Module, file_bytes: int) -> _Plan:
    """Return the tensors of each file; refuse unsupported dtypes before anything is written."""
    held = full_tensors.names(plain, duplicates=True)
    state = plain.state_dict()
    extra = [key for key, value in state.items() if key not in held and value is not None]
    if extra:
        raise CheckpointError(
            f"{extra[0]} is no plain parameter or buffer, and safetensors holds nothing else.",
            do="layout.state_dict() and torch.save",
        )
    shards: list[dict[str, TensorFacts]] = [{}]
    filled = 0
    for name, facts in table.items():
        if shards[-1] and filled + facts.nbytes > file_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = facts
        filled += facts.nbytes
    count = len(shards)
    files = {
        SINGLE if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors": shard
        for i, shard in enumerate(shards, 1)
    }
    # As safetensors.torch.save_model records tied weights, which are in a file once.
    kept = {id(held[name]): name for name in table if name in held}
    tied = {
        name: kept[id(held[name])]
        for name in state
        if name in held and name not in table and id(held[name]) in kept
    }
    for shard in files.values():
        header_of({n: (f.dtype, tuple(f.shape)) for n, f in shard.items()}, {})
    return _Plan(files, {"format": "pt", **tied})


def _write(
    plan: _Plan, folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], written: list[Path]
) -> None:
    """Write the files and their index under temporary names; `written` gets them."""
    for file_name, shard in plan.files.items():
        path = folder / (file_name + _PARTIAL)
        written.append(path)
        with path.open("wb") as file:
            shapes = {n: (f.dtype, tuple(f.shape)) for n, f in shard.items()}
            file.write(header_of(shapes, plan.metadata))
            for name in shard:
                there, full = next(tensors)
                assert there == name, "tensors come in the table's order"
                _append(file, full)
            file.flush()
            os.fsync(file.fileno())
    if len(plan.files) > 1:
        written.append(folder / (INDEX + _PARTIAL))
        written[-1].write_text(json.dumps(_index(plan), indent=2) + "\n", encoding="utf-8")


def _index(plan: _Plan) -> dict[str, Any]:
    size = sum(f.nbytes for shard in plan.files.values() for f in shard.values())
    places = {name: file for file, shard in plan.files.items() for name in shard}
    return {"metadata": {"total_size": size}, "weight_map": places}


def _append(file: BinaryIO, full: torch.Tensor) -> None:
    own = full.detach().to("cpu").contiguous()
    if own.numel():
        file.write(bytes_of(own))


def _commit(plan: _Plan, folder: Path) -> None:
    """Give the files their names, the index last, and remove the weights that were there."""
    former = {path.name for path in folder.glob("model*.safetensors")}
    with contextlib.suppress(FileNotFoundError):
        (folder / INDEX).unlink()
    for name in plan.files:
        os.replace(folder / (name + _PARTIAL), folder / name)
    for name in former - plan.files.keys():
        (folder / name).unlink()
    if len(plan.files) > 1:
        os.replace(folder / (INDEX + _PARTIAL), folder / INDEX)
