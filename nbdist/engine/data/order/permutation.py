"""An order of very many samples that takes no memory. Pure: numpy alone."""

from typing import overload

import numpy as np
import numpy.typing as npt

from nbdist.engine.data.batches import mix

_ROUNDS = 8  # Luby and Rackoff prove 4 enough where a round's function is random itself

Numbers = npt.NDArray[np.uint64]


class Permutation:
    """A pseudorandom permutation of `range(samples)`, found place by place.

    Like a shuffled tensor it is indexed and sliced. A number is cut into halves, which a Feistel
    network mixes: whatever its rounds do, that is one to one. It permutes a power of 4, so a number
    beyond the end is permuted on until it falls within (cycle walking), 4 times at most on average.

    Source: M. Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom
    functions", 1988; J. Black, P. Rogaway, "Ciphers with arbitrary finite domains", 2002, sections
    "Cycle-walking cipher" and "Generalized-Feistel cipher". A round's function is the end of
    SplitMix64 (G. Steele, D. Lea, C. Flood, 2014).
    """

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._half = np.uint64(max(1, ((samples - 1).bit_length() + 1) // 2))  # bits
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(mix(seed, nth)) for nth in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._samples

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> npt.NDArray[np.int64]: ...
    def __getitem__(self, at: int | slice) -> int | npt.NDArray[np.int64]:
        """Return what stands at a place, or at several."""
        places = range(self._samples)[at]
        if isinstance(places, int):
            return int(self[places : places + 1][0])
        found = self._mixed(np.arange(places.start, places.stop, places.step, dtype=np.uint64))
        while (beyond := found >= self._samples).any():
            found[beyond] = self._mixed(found[beyond])
        return found.astype(np.int64)

    def _mixed(self, numbers: Numbers) -> Numbers:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_scattered(right + key) & self._mask)
        return (left << self._half) | right


def _scattered(numbers: Numbers) -> Numbers:
    """Return numbers of which each bit depends on all of the given ones (SplitMix64's end)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
