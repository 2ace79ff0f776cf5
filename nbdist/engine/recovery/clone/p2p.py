"""Bytes from one rank to another through the backend of the default group, past the tap.

What is sent here belongs to no cell: it must not be counted, timed or announced as the user's.
The group's `abort` ends a wait here as it does any other. Main thread only.
"""

import ctypes
import pickle
import warnings
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch

from nbdist.engine.compat.groups import torch_backends

_TAG = 0x636C  # of our messages, beside a user's own
_MESSAGE_BYTES = 64 << 20
_SMALL_BYTES = 64 << 10  # below this, a copy is cheaper than a message


class P2PTransfer:
    """A pipe to one rank of the default group."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._backend, self._device = torch_backends.default_backend()

    def send(self, value: Any) -> None:
        """Send a small value, pickled."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._send(torch.tensor([len(data)]))
        self._send(data)

    def receive(self) -> Any:
        """Return the next value of the peer's `send`."""
        size = self._receive(torch.empty(1, dtype=torch.int64))
        data = self._receive(torch.empty(int(size), dtype=torch.uint8))
        return pickle.loads(data.numpy().tobytes())

    def send_buffers(self, buffers: list[memoryview]) -> None:
        """Send raw buffers: large ones as they are, small ones together."""
        self.send([len(buffer) for buffer in buffers])
        for chunk in _chunks([len(buffer) for buffer in buffers]):
            parts = [buffers[i][begin:end] for i, begin, end in chunk]
            self._send(_as_tensor(parts[0] if len(parts) == 1 else bytearray(b"".join(parts))))

    def receive_buffers(self) -> list[Any]:
        """Return the peer's buffers, each over memory of torch's own (see `over`)."""
        sizes = self.receive()
        tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for chunk in _chunks(sizes):
            views = [tensors[i][begin:end] for i, begin, end in chunk]
            if len(views) == 1:
                self._receive(views[0])
                continue
            together = self._receive(torch.empty(sum(map(len, views)), dtype=torch.uint8))
            for view, part in zip(views, together.split([len(v) for v in views]), strict=True):
                view.copy_(part)
        return [over(tensor) for tensor in tensors]

    def _send(self, data: torch.Tensor) -> None:
        self._backend.send([data.to(self._device)], self._peer, _TAG).wait()

    def _receive(self, data: torch.Tensor) -> torch.Tensor:
        landed = data if self._device.type == "cpu" else torch.empty_like(data, device=self._device)
        self._backend.recv([landed], self._peer, _TAG).wait()
        return data if landed is data else data.copy_(landed)


def over(tensor: torch.Tensor) -> Any:
    """Return a writable buffer over a tensor's bytes, whose `owner` is the tensor.

    Not `numpy()`: it makes the storage one that cannot be resized.
    """
    buffer: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    buffer.owner = tensor
    return buffer


def _as_tensor(data: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        # Of arrays that are read-only: we only read.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=torch.uint8)


def _chunks(sizes: Iterable[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Cut buffers of these sizes into messages: each a list of (buffer, begin, end).

    Empty buffers are in no message.
    """
    together: list[tuple[int, int, int]] = []
    room = _MESSAGE_BYTES
    for index, size in enumerate(sizes):
        if size > _SMALL_BYTES:
            bounds = [*range(0, size, _MESSAGE_BYTES), size]
            yield from ([(index, begin, end)] for begin, end in pairwise(bounds))
        elif size:
            if size > room:
                yield together
                together, room = [], _MESSAGE_BYTES
            together.append((index, 0, size))
            room -= size
    if together:
        yield together
