"""Samples in groups that are read whole: what a loader asks of data without items by index."""

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

# By name: numpy arrays, pyarrow arrays or lists, all of one length (`columns`).
Columns = dict[str, Any]


class Source(Protocol):
    """Where samples come from. It travels to a replacement rank, so it can be pickled.

    The samples are numbered through: sample `i` of group `g` is number `sum(sizes[:g]) + i`.
    """

    @property
    def name(self) -> str:
        """What it is called in messages: the path or the table as its user knows it."""

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Samples of each group, int64[groups], one at least; known without reading the data."""

    @property
    def fingerprint(self) -> int:
        """A number of 63 bits that differs where the groups or their sizes do (`fingerprint`)."""

    @property
    def is_far(self) -> bool:
        """Whether reads wait for a store more than they take a core."""

    def read(self, group: int) -> Columns:
        """Return the samples of a group, in their own order. On reader threads, some at a time.

        Raises:
            DataError: It cannot be read; the text names the file and the group.
        """

    def where(self, group: int) -> str:
        """Return where a group lies, for messages: file and row group."""


def fingerprint(parts: Iterable[object]) -> int:
    """Return the fingerprint of data: the same wherever it lies, another when it has changed.

    Args:
        parts: Names of files without their folder, their sizes, and the sizes of their groups.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
        digest.update(b"\0")
    return int.from_bytes(digest.digest(), "little") >> 1
