"""Take the states of Python's, numpy's and a GPU's own generators at each step; put them back.

Main thread: who draws on other threads has no order to keep. Generators that a program has made are
its own.
"""

import ctypes
import random
import sys
from typing import Any, Final, NamedTuple

import torch

# Where an MT19937 of numpy has its 624 words, an index behind them, and what of it changes with
# each draw: the index and, when that comes round, all words.
_WORDS_BYTES: Final = 624 * 4
_LOOKED_AT: Final = 16


class States(NamedTuple):
    """Both generators' states at one moment; `numpy` is None where it is not imported."""

    python: Any  # of `random.getstate`
    numpy: Any  # of `numpy.random.get_state`


def take() -> States:
    """Return the states now. They are never changed, and good in any process."""
    return States(random.getstate(), _numpy.take())


def put_back(states: States) -> None:
    """Have both generators draw again what they drew after `states` was taken."""
    random.setstate(states.python)
    if states.numpy is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states.numpy)


def take_cuda() -> torch.Tensor:
    """Return the state of the current GPU's generator, the same tensor where nothing was drawn."""
    state: torch.Tensor = _cuda.take(torch.cuda.default_generators[torch.cuda.current_device()])
    return state


class _Cuda:
    """A GPU's generator: its seed and how far it is say whether it has been drawn from."""

    def __init__(self) -> None:
        self._drawn: tuple[Any, ...] = ()
        self._last: Any = None

    def take(self, generator: Any) -> Any:
        drawn = (generator.device, generator.initial_seed(), generator.get_offset())
        if drawn != self._drawn:
            self._drawn, self._last = drawn, generator.get_state()
        return self._last


class _Numpy:
    """The generator behind `numpy.random.rand()`.

    To ask it takes 80 us, more than all else at a step, and most loops never draw from it. So it is
    asked when its words have moved since, and while it keeps back one of a pair of numbers.
    """

    def __init__(self) -> None:
        self._of: Any = None  # the bit generator that `_words` is of; a program may set another
        self._words: ctypes.Array[ctypes.c_char] | None = None
        self._seen = b""
        self._last: Any = None

    def take(self) -> Any:
        """Return the state, as numpy gives it."""
        module = getattr(sys.modules.get("numpy"), "random", None)
        if module is None:  # not imported, or about to be
            return None
        generator = module.get_bit_generator()
        if generator is not self._of:
            self._of, self._words, self._last = generator, _words_of(generator), None
        if self._words is None:
            return module.get_state(legacy=False)
        seen = self._words.raw
        if self._last is None or seen != self._seen or self._last["has_gauss"]:
            self._seen, self._last = seen, module.get_state(legacy=False)
        return self._last


def _words_of(generator: Any) -> ctypes.Array[ctypes.c_char] | None:
    """Return the last words and the index, at the address that numpy gives; None: another kind."""
    if type(generator).__name__ != "MT19937":
        return None
    first = generator.ctypes.state_address + _WORDS_BYTES + 4 - _LOOKED_AT
    return (ctypes.c_char * _LOOKED_AT).from_address(first)


_cuda = _Cuda()
_numpy = _Numpy()
