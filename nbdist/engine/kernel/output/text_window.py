"""The newest bytes of a long text of several streams, in order. Pure."""

from collections import deque
from collections.abc import Iterable
from typing import Final

WINDOW_BYTES: Final = 4 * 1024

Part = tuple[str, str]  # (stream's name, text)


class TextWindow:
    """The newest `WINDOW_BYTES` of a text, and how many bytes came before them."""

    def __init__(self) -> None:
        self._parts: deque[tuple[str, str, int]] = deque()
        self._size = 0
        self.total = 0

    def add(self, name: str, text: str, size: int) -> None:
        """Append a text of so many bytes, and drop the oldest ones."""
        self.total += size
        if size > WINDOW_BYTES:
            self._parts.clear()
            self._size = 0
            text = text[-WINDOW_BYTES:]
            size = len(text.encode(errors="replace"))
        self._parts.append((name, text, size))
        self._size += size
        while self._size - self._parts[0][2] >= WINDOW_BYTES:
            self._size -= self._parts.popleft()[2]

    @property
    def cut_bytes(self) -> int:
        """How many bytes were dropped."""
        return self.total - self._size

    def parts(self) -> list[Part]:
        """Return the remaining parts, oldest first."""
        return [(name, text) for name, text, _ in self._parts]


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return parts with neighbours of one stream joined: fewer and larger."""
    pieces: list[tuple[str, list[str]]] = []
    for name, text in parts:
        if pieces and pieces[-1][0] == name:
            pieces[-1][1].append(text)
        else:
            pieces.append((name, [text]))
    return [(name, "".join(texts)) for name, texts in pieces]


def as_lists(parts: Iterable[Part]) -> list[list[str]]:
    """Return the same as lists, as they are published."""
    return [[name, text] for name, text in joined(parts)]
