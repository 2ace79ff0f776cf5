"""Tell which names mean different things on different ranks, by small fingerprints of values.

A new rank gets the values of one rank. What differs between those that live was most likely made
from the rank's number (`checkpoint = f"{rank}.pt"`), and the new rank has another rank's now.

Only what is cheap to tell is looked at: numbers, texts, arrays, parameters of plain modules,
containers and what plain objects show, a bounded part of each; of models that ranks train together,
optimizers and all that belongs to a process its type alone. A tensor that a loop of a cell has
bound, such as its batch, is of the loop's last turn and tells nothing. Main thread only.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from itertools import islice
from pathlib import PurePath
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from nbdist.engine.compat import torch_live, torch_modules, torch_pipeline, torch_sharded
from nbdist.engine.compat.checkpoints import tensor_bytes
from nbdist.engine.data.loaders import Loader
from nbdist.engine.group import group_names
from nbdist.engine.layout.layout import Layout
from nbdist.engine.recovery.clone import loop_names
from nbdist.engine.recovery.clone.recipes import OWN_PLACES, stands_at_own_rank
from nbdist.engine.steps.optimizer_wrapper import ApartWrapper

log = logging.getLogger(__name__)

_MOST_PARTS = 5000  # of one value
_MOST_ITEMS = 200  # of one container
_MOST_DEPTH = 6
_MOST_CHARS = 4096  # of one text
_MOST_NUMBERS = 1 << 14  # of one tensor

# Told apart by their types: they are a process's own, or equal by other means.
_OPAQUE = (
    *(torch.optim.Optimizer, torch.amp.GradScaler, torch.device, torch.Generator),
    *(dist.device_mesh.DeviceMesh, Loader, Layout),
    *(type, ModuleType, FunctionType, MethodType),
)


def of_names(names: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprint of each value; an empty one where none can be taken.

    Tensors that a loop has bound have none.
    """
    marks = {}
    of_a_turn = loop_names.of_cells()
    for name, value in names.items():
        if name in of_a_turn and isinstance(value, torch.Tensor):
            continue
        try:
            marks[name] = fingerprint(value)
        except Exception as error:  # a thread of the user's may change what is read
            log.debug("No fingerprint of %s: %s", name, error)
            marks[name] = ""
    return marks


def fingerprint(value: Any) -> str:
    """Return a short text, equal on ranks where the value is."""
    text = _Reader().read(value, 0)
    return blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def differing(marks: Mapping[int, Mapping[str, str]], source: int) -> list[str]:
    """Return the source's names whose values are not the same on all ranks, or not on all.

    Args:
        marks: Of every rank that lives, as of `of_names`.
        source: One of them.
    """
    return [
        name
        for name, mark in marks[source].items()
        if mark and any(other.get(name) not in ("", mark) for other in marks.values())
    ]


class _Reader:
    """Reads one value, a bounded number of its parts."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS
        self._around: list[int] = []  # ids of what is being read, the outermost first

    def read(self, value: Any, depth: int) -> str:
        self._left -= 1
        kind = type(value)
        if isinstance(value, dist.ProcessGroup) or group_names.is_mark(value):
            return "process group"  # each rank has its own, see `group_names`
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, nn.Module):
            # torch's own classes before it are made again
            return f"{torch_sharded.plain_name(value)} {_weights(value)}"
        if isinstance(value, _OPAQUE) or self._left < 0 or depth > _MOST_DEPTH:
            return name
        plain = _plain(value)
        if plain is not None:
            return f"{name} {plain}"
        if id(value) in self._around:
            return f"again {self._around.index(id(value))}"
        self._around.append(id(value))
        try:
            if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
                return f"{name} {len(value)} {self._read_items(value, depth + 1)}"
            return f"{name} {self._read_pairs(_attributes(value), depth + 1)}"
        finally:
            self._around.pop()

    def _read_items(self, value: Any, depth: int) -> str:
        if isinstance(value, dict):
            return self._read_pairs(dict.items(value), depth)
        if isinstance(value, (set, frozenset)):  # their order is another one in each process
            return self._read_set(value, depth) if len(value) <= _MOST_ITEMS else ""
        return "[" + ", ".join(self.read(item, depth) for item in islice(value, _MOST_ITEMS)) + "]"

    def _read_set(self, items: Collection[Any], depth: int) -> str:
        """Read each item as far as an equal share goes: which comes first is no value's own."""
        left, share = self._left, self._left // max(1, len(items))
        read = []
        for item in items:
            self._left = share
            read.append(self.read(item, depth))
            left -= share - self._left
        self._left = left
        return " ".join(sorted(read))

    def _read_pairs(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> str:
        read = (
            f"{self.read(key, depth)}: {self.read(value, depth)}"
            for key, value in islice(pairs, _MOST_ITEMS)
        )
        return "{" + ", ".join(read) + "}"


def _weights(module: nn.Module) -> str:
    """Return what tells a plain module's parameters apart; "" of one that ranks train together."""
    parameters = list(islice(module.parameters(), _MOST_ITEMS))
    wrapped = [*torch_modules.live_ddps(), *torch_sharded.live_sharded()]
    averaged = (
        o for o in torch_live.here.live(torch.optim.Optimizer) if isinstance(o, ApartWrapper)
    )
    together = {id(p) for one in wrapped for p in one.parameters()}
    together |= {id(p) for one in averaged for p in one.parameters()}
    if any(id(p) in together for p in parameters) or torch_pipeline.here.laid_models():
        return ""
    return " ".join(map(_numbers, parameters))


def _plain(value: Any) -> str | None:
    """Return what tells a value apart that has no parts; None for others."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{tuple(value.shape)} {value.dtype} {_numbers(value)}"
    if isinstance(value, str):
        return _bounded(str.__str__(value))
    if isinstance(value, (bytes, bytearray)):
        return _bounded(bytes(value[:_MOST_CHARS]).hex()) + f" {len(value)}"
    if isinstance(value, int):
        return int.__format__(value, "x")  # a hash has one for -1 and -2; digits have a limit
    if value is None or isinstance(value, (float, complex, range, slice, np.generic)):
        return repr(value)
    return str(value) if isinstance(value, PurePath) else None


def _numbers(value: Any) -> str:
    """Return what tells an array's or a tensor's numbers apart, in their order; "" where not read.

    Of large ones a fixed selection is read. What a graph has computed belongs to a step, and parts
    of a tensor that is spread over ranks differ rightfully.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return ""
        flat = value.reshape(-1)
        chosen = np.ascontiguousarray(flat[:: -(-flat.size // _MOST_NUMBERS) or 1])
    else:
        is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.grad_fn is None
        if not is_plain or value.is_meta or value.is_quantized or value.layout != torch.strided:
            return ""
        flat = value.detach().reshape(-1)
        step = -(-flat.numel() // _MOST_NUMBERS) or 1
        chosen = tensor_bytes.raw(flat[::step].cpu().contiguous()).numpy()
    return blake2b(chosen.tobytes(), digest_size=8).hexdigest()


def _bounded(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} {len(text)}"


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    """Return an object's own public attributes: private ones are caches and counters."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    left_out = set()
    if isinstance(value, DataLoader):  # its workers' things are the process's own
        left_out = own.keys() - {"dataset", "sampler", "batch_sampler", "batch_size"}
    if stands_at_own_rank(value):
        left_out = OWN_PLACES
    return [(k, v) for k, v in own.items() if not str(k).startswith("_") and k not in left_out]
