"""What a save writes of tensors: copies that training may not touch, or the tensors themselves.

A copy lies in CPU memory that the next save uses again: new memory is ten times as slow. Sums of
bits tell whether a tensor that was to be copied later is still what it was; a copy is summed piece
by piece while a core's cache holds it.

Threads: a save's main thread makes it; `copy_rest` and what follows it run on the save's own.
"""

from collections.abc import Iterable, Mapping

import torch

from nbdist.engine.compat.tensor_frame import lies_whole
from nbdist.engine.compat.torch_checkpoint import TensorKey

_PIECE = 1 << 20  # bytes that are copied, and summed while the cache holds them
_WORD = 8  # bytes
_MASK = (1 << 64) - 1  # sums wrap around

Source = tuple[TensorKey, torch.Tensor]
Room = dict[TensorKey, torch.Tensor]


class Staged:
    """The tensors that one rank writes.

    Args:
        room: Copies of the save before; filled with those that are made.

    Attributes:
        content: What is written, by name and offset.
        steady: Tensors that stay as they are for a while, likewise.
    """

    def __init__(self, room: Room) -> None:
        self.content: Room = {}
        self.steady: Room = {}
        self._copies: Room = {}
        self._sums: dict[TensorKey, int] = {}
        self._changed = ""
        self._room = room

    def borrow(self, sources: Iterable[Source]) -> None:
        """Take tensors as they are: nothing changes them until they are written.

        Those that cannot be written from where they lie are copied.
        """
        every = list(sources)
        self.content.update((key, source) for key, source in every if lies_whole(source))
        self.copy((key, source) for key, source in every if not lies_whole(source))

    def copy(self, sources: Iterable[Source]) -> None:
        """Copy tensors now."""
        for key, source in sources:
            self._buffer(key, source).copy_(source, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def leave(self, sources: Mapping[TensorKey, torch.Tensor]) -> None:
        """Leave tensors for `copy_rest`, and remember what their bits are now.

        `.data` changes them, and no version tells.
        """
        self.steady.update(sources)
        self._sums = {key: _sum_of(source) for key, source in sources.items()}

    def copy_rest(self) -> int:
        """Copy the tensors that were left for later, and return how many. Any thread; once."""
        rest = [(key, source) for key, source in self.steady.items() if key not in self.content]
        for key, source in rest:
            buffer = self._buffer(key, source)
            if _copied(source, buffer) != self._sums[key] and not self._changed:
                self._changed = key[0]
        for key in self._room.keys() - self.content.keys():
            del self._room[key]
        self._room.update(self._copies)  # never what was borrowed: the next save writes into it
        return len(rest)

    def changed(self) -> str:
        """Return the name of a tensor that was changed before it was copied, or nothing."""
        return self._changed

    def is_as_copied(self) -> bool:
        """Return whether no steady tensor differs from its copy. Reads all of them."""
        return all(torch.equal(source, self.content[key]) for key, source in self.steady.items())

    def _buffer(self, key: TensorKey, source: torch.Tensor) -> torch.Tensor:
        """Return room for a tensor's copy, which is written from then on."""
        buffer = self._room.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            on_gpu = source.device.type == "cuda"
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=on_gpu)
        self.content[key] = self._copies[key] = buffer
        return buffer


def _copied(source: torch.Tensor, buffer: torch.Tensor) -> int:
    """Copy a CPU tensor, and return the sum of the copy's bits, as `_sum_of` does."""
    if not _lies_in_words(source):
        buffer.copy_(source)
        return _sum_of(buffer)
    total = 0
    for target, origin in zip(_words(buffer), _words(source), strict=True):
        step = _PIECE // target.element_size()
        for begin in range(0, target.numel(), step):
            piece = target[begin : begin + step]
            piece.copy_(origin[begin : begin + step])
            total += int(piece.sum())
    return total & _MASK


def _sum_of(tensor: torch.Tensor) -> int:
    """Return the sum of a CPU tensor's bits, at the memory's speed."""
    whole = (
        tensor if _lies_in_words(tensor) else tensor.clone(memory_format=torch.contiguous_format)
    )
    return sum(int(words.sum()) for words in _words(whole)) & _MASK


def _lies_in_words(tensor: torch.Tensor) -> bool:
    return lies_whole(tensor) and tensor.storage_offset() * tensor.element_size() % _WORD == 0


def _words(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor's bits as numbers: whole words, and the bytes that are left over."""
    flat = tensor.detach().view(-1)
    left = flat.numel() * flat.element_size() % _WORD
    if not left:
        return [flat.view(torch.int64)]
    raw = flat.view(torch.uint8)
    return [raw[:-left].view(torch.int64), raw[-left:]]
