"""A file that is counted as it is written: its size, and its CRC-32 in the same pass.

Used by `torch_checkpoint`, and apart from it as it knows nothing of torch. Any thread; a stream
belongs to one.
"""

import io
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

_SMALL_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20  # summed and written while a core's cache still holds it
_TO_DISK_BYTES = 8 << 20  # of a file, after which the disk begins with them
_POLYNOMIAL = 0xEDB88320  # of CRC-32, its bits in reverse, as zlib has it


@dataclass
class FileFacts:
    """How long a file is, and its CRC-32."""

    size: int = 0
    crc: int = 0

    def add(self, chunk: Any) -> None:
        """Count bytes that are written to the file."""
        self.add_counted(memoryview(chunk).nbytes, zlib.crc32(chunk))

    def add_counted(self, nbytes: int, crc: int) -> None:
        """Count bytes whose CRC-32 is known."""
        self.size += nbytes
        self.crc = joined_crc(self.crc, crc, nbytes)


def joined_crc(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two pieces one after the other, from theirs.

    Args:
        first: Of what comes first.
        second: Of what follows.
        nbytes: How long that is.

    Source: `crc32_combine` of zlib, which Python's zlib does not offer.
    """
    return _product(_shift(nbytes), first) ^ second


@lru_cache(4096)  # tensors of a model have few sizes
def _shift(nbytes: int) -> int:
    """Return x to the power of 8 times `nbytes`, modulo the polynomial."""
    result, power = 1 << 31, 1 << 23  # x ** 0, x ** 8
    while nbytes:
        if nbytes & 1:
            result = _product(power, result)
        power = _product(power, power)
        nbytes >>= 1
    return result


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32; bit 31 is x ** 0."""
    result, bit = 0, 1 << 31
    while a:
        if a & bit:
            result ^= b
            a ^= bit
        bit >>= 1
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


class CountedStream(io.RawIOBase):
    """A stream that counts what is written to it.

    torch writes each tensor in some forty pieces, nearly all of some bytes: those are joined.

    Args:
        stream: Where bytes go.
        facts: Where they are counted.
        before_write: Called before each write, and may raise to end it.
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
        """Write bytes."""
        nbytes = memoryview(chunk).nbytes
        if nbytes < _SMALL_BYTES:
            self._small += chunk
            if len(self._small) >= _SMALL_BYTES:
                self._pass_on_small()
        else:
            self.write_counted(chunk)
        return nbytes

    def write_counted(self, content: Any) -> int:
        """Write bytes, and return their own CRC-32."""
        view = memoryview(content).cast("B")
        if view.nbytes < _SMALL_BYTES:
            self.write(view)
            return zlib.crc32(view)
        self._pass_on_small()
        crc = 0
        for begin in range(0, view.nbytes, _CHUNK_BYTES):
            chunk = view[begin : begin + _CHUNK_BYTES]
            crc = zlib.crc32(chunk, crc)
            self._before_write()
            self._stream.write(chunk)
        self._facts.add_counted(view.nbytes, crc)
        self._begin_on_disk()
        return crc

    def _pass_on_small(self) -> None:
        if self._small:
            small, self._small = bytes(self._small), bytearray()
            self._before_write()
            self._stream.write(small)
            self._facts.add(small)

    def _begin_on_disk(self) -> None:
        """Have the disk write what it has been given, beside what is still to come.

        Linux begins to write pages that it is told are not needed; by itself it would wait for
        the sync at the end, which then waits for all of them.
        """
        nbytes = self._facts.size - self._begun
        if self._descriptor is None or nbytes <= _TO_DISK_BYTES:
            return
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, self._begun, nbytes, os.POSIX_FADV_DONTNEED)
        self._begun = self._facts.size

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._facts.size + len(self._small)

    def fileno(self) -> int:
        """Return the file's, which torch asks for to sync it: all of it must be there."""
        self.flush()
        return self._stream.fileno()

    def flush(self) -> None:
        """Pass on what is kept back."""
        if not self._stream.closed:
            self._pass_on_small()
            self._stream.flush()

    def close(self) -> None:
        """Pass on what is kept back, and close the file."""
        if not self.closed:
            try:
                self.flush()
            finally:
                self._stream.close()
        super().close()
