"""Send a frame and its tensors from one rank to another, over the default group.

Tensors travel as bytes in pieces of bounded size, on their own kind of device: a few messages, and
little room beside them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbdist.engine.compat.checkpoints import tensor_bytes

PIECE_BYTES = 32 << 20

_Meta = tuple[tuple[int, ...], torch.dtype, str]  # shape, dtype, type of device


def send(frame: Any, tensors: Sequence[torch.Tensor], rank: int) -> None:
    """Send to a rank, which calls `receive` at the same time. Main thread."""
    metas: list[_Meta] = [(tuple(t.shape), t.dtype, t.device.type) for t in tensors]
    dist.send_object_list([(frame, metas)], rank)
    for piece in _pieces(metas):
        flat = [tensor_bytes.raw(tensors[i].contiguous()) for i in piece]
        dist.send(torch.cat(flat), rank)


def receive(rank: int) -> tuple[Any, list[torch.Tensor]]:
    """Return the frame and the tensors that a rank sends."""
    box: list[Any] = [None]
    dist.recv_object_list(box, rank)
    frame, metas = box[0]
    tensors: dict[int, torch.Tensor] = {}
    for piece in _pieces(metas):
        sizes = [_size_bytes(metas[i]) for i in piece]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=_device(metas[piece[0]][2]))
        dist.recv(flat, rank)
        for i, part in zip(piece, flat.split(sizes), strict=True):
            shape, dtype, _ = metas[i]
            # A copy begins where its dtype may begin.
            tensors[i] = part.clone().view(dtype).view(shape)
    return frame, [
        tensors[i] if i in tensors else torch.empty(shape, dtype=dtype, device=_device(kind))
        for i, (shape, dtype, kind) in enumerate(metas)
    ]


def _pieces(metas: Sequence[_Meta]) -> Iterator[list[int]]:
    """Return which tensors travel together: of one device, and of PIECE_BYTES if there are more."""
    for kind in sorted({meta[2] for meta in metas}):
        piece: list[int] = []
        size = 0
        for i, meta in enumerate(metas):
            if meta[2] != kind or not _size_bytes(meta):
                continue
            if piece and size + _size_bytes(meta) > PIECE_BYTES:
                yield piece
                piece, size = [], 0
            piece.append(i)
            size += _size_bytes(meta)
        if piece:
            yield piece


def _size_bytes(meta: _Meta) -> int:
    shape, dtype, _ = meta
    return torch.Size(shape).numel() * dtype.itemsize


def _device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
