"""Tensors as `torch.save` writes them, without its work for each.

What `torch.save` writes around a tensor's bytes is the same for all of one shape and dtype, but for
their CRC-32. So it is kept when it has written the first, as a frame, and put around the next: of
the time that `torch.save` takes for a tensor of 1 MB nine tenths go into a checksum of its own.
Nothing is assumed of its format: where the bytes and their checksum are not found in what it has
written, once and twice, it writes the next tensor as well.

Any thread.
"""

from dataclasses import dataclass
from typing import Any

import torch

from nbdist.engine.compat.checkpoints import tensor_bytes
from nbdist.engine.compat.checkpoints.counted_stream import CountedStream

_KEPT_BYTES = 4096  # of a tensor: one of torch's own pieces may be as long
_MOST_FRAMES = 4096  # shapes; of some 2 kB each

Kind = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True, slots=True)
class Frame:
    """What lies around the bytes of a tensor: before them, and after, cut where their CRC-32 is."""

    head: bytes
    tail: tuple[bytes, bytes, bytes]

    def tail_of(self, crc: int) -> bytes:
        """Return what follows bytes of this CRC-32."""
        return crc.to_bytes(4, "little").join(self.tail)


class Frames:
    """The frames that a process has seen, by the kind of tensor. Empty until torch has written."""

    def __init__(self) -> None:
        self._seen: dict[Kind, Frame] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def write(self, tensor: torch.Tensor, stream: CountedStream) -> None:
        """Write a tensor to a stream, as `torch.save` does.

        Args:
            tensor: On the CPU; its elements lie one after another.
            stream: Where it goes.
        """
        kind = tensor.shape, tensor.dtype
        frame = self._seen.get(kind)
        if frame is None:
            frame = _written_by_torch(tensor, stream)
            if frame is not None and len(self) < _MOST_FRAMES:
                self._seen[kind] = frame
            return
        stream.write(frame.head)
        crc = stream.write_counted(_bytes_of(tensor))
        stream.write(frame.tail_of(crc))


def lies_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes can be written from where they lie."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor_bytes.raw(tensor).numpy()
    return memoryview(array)


def _written_by_torch(tensor: torch.Tensor, stream: CountedStream) -> Frame | None:
    recorder: Any = _Recorder(stream, tensor.nbytes)
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes  # torch would write all of it
    torch.save(tensor.detach().clone() if is_part else tensor.detach(), recorder)
    frame: Frame | None = recorder.frame()
    return frame


class _Recorder:
    """Passes on what `torch.save` writes, and keeps all but the tensor's bytes."""

    def __init__(self, stream: CountedStream, nbytes: int) -> None:
        self._stream, self._nbytes = stream, nbytes
        self._pieces: list[bytes] = []
        self._crcs: dict[int, int] = {}  # of pieces that may be the tensor's bytes, by number

    def write(self, chunk: Any) -> int:
        """Pass on bytes; torch calls it."""
        size = memoryview(chunk).nbytes
        if size == self._nbytes and size:
            self._crcs[len(self._pieces)] = self._stream.write_counted(chunk)
            self._pieces.append(bytes(chunk) if size < _KEPT_BYTES else b"")
        else:
            self._stream.write(chunk)
            self._pieces.append(bytes(chunk))
        return size

    def flush(self) -> None:
        """Do nothing: the stream is flushed when all tensors are there."""

    def frame(self) -> Frame | None:
        """Return what was written around the tensor's bytes, if these are known for sure."""
        if self._nbytes >= _KEPT_BYTES and len(self._crcs) != 1:
            return None
        found = []
        for number, crc in self._crcs.items():
            tail = b"".join(self._pieces[number + 1 :]).split(crc.to_bytes(4, "little"))
            if len(tail) == 3:
                found.append(Frame(b"".join(self._pieces[:number]), (tail[0], tail[1], tail[2])))
        return found[0] if len(found) == 1 else None


here = Frames()
