"""Note the state of Python's, numpy's and torch's own generators at each step, in a microsecond.

Asking Python's and numpy's costs 20 and 80 us, more than all else that is noted at a step, and most
loops draw from neither. So their 624 words are read from memory. Those and a number kept back are
all of Python's state. numpy keeps back a number as well, and where, it does not tell: it is asked,
but only when its words have changed since it last was, or when it has kept one back.

Whether they have changed is told by a few of them: each draw moves the index, and when that comes
round all words are new.

numpy tells the address of its words (`bit_generator.ctypes`); of Python's, CPython's struct behind
`random.Random` is used: `int index; uint32_t state[624]`, Modules/_randommodule.c. Where it is not
so, Python's generator is asked. Main thread; whoever draws on other threads has no order to keep.

torch's, on the CPU, is asked when it has been drawn from: that is a new tensor of 5 kB, 10 us. What
tells of it stands in `at::CPUGeneratorImpl` (ATen/CPUGeneratorImpl.h), seen from `_cdata`. Whether
each kind of draw changes what is looked at there is tried, once, on a generator of our own.
"""

import ctypes
import random
import struct
import sys
from typing import Any, Final, NamedTuple

import torch

_WORDS: Final = 624
_LAYOUT: Final = struct.Struct(f"=i{_WORDS}I")  # index, words
_FEW: Final = 16  # bytes that tell of a change: the index and three words beside it
_VERSION: Final = 3  # of what `random.getstate` returns
# Of torch's: where the index and three words beside it are, and the two numbers kept back.
_TORCH_FEW: Final = (88, 24)
_TORCH_KEPT_BACK: Final = (2600, 24)

_Memory = ctypes.Array[ctypes.c_char]


class States(NamedTuple):
    """The states of both generators at one moment; `numpy` is None where it is not imported."""

    python: Any  # of `_Python.take`
    numpy: Any  # of `numpy.random.get_state`


def check() -> list[str]:
    """Return what of CPython's struct is not as we read it; a dearer way is taken then."""
    python = (
        [] if _python.is_read() else [f"Python {sys.version.split()[0]}: random.Random differs"]
    )
    return python + ([] if _torch.is_read() else [f"torch {torch.__version__}: Generator differs"])


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


_cuda = _Cuda()


def take() -> States:
    """Return the states now."""
    global _last
    python, numpy = _python.take(), _numpy.take()
    if _last.python is not python or _last.numpy is not numpy:
        _last = States(python, numpy)
    return _last


def take_torch() -> torch.Tensor:
    """Return the state of torch's generator for the CPU, which nobody may change."""
    return _torch.take()


def put_back(states: States) -> None:
    """Have both generators draw again what they drew after `states` was taken."""
    _python.put_back(states.python)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)


def told(states: States) -> States:
    """Return what `take` returned as both modules themselves tell it: good in any process."""
    return States(_python.told(states.python), states.numpy)


def put_back_told(states: States) -> None:
    """Go back to what `told` returned."""
    random.setstate(states.python)
    if states.numpy is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states.numpy)


class _Python:
    """The generator behind `random.random()` and its like."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        size = type(generator).__mro__[1].__basicsize__  # of the C struct; it may be padded
        start = object.__basicsize__
        self._memory: _Memory | None = None
        self._seen, self._last = b"", (b"", None)
        if _LAYOUT.size <= size - start < _LAYOUT.size + 8:
            self._memory = _at(id(generator) + start, _LAYOUT.size)
            self._few = _at(id(generator) + start, _FEW)
            if not self._agrees():
                self._memory = None

    def is_read(self) -> bool:
        """Return whether the words are read from memory."""
        return self._memory is not None

    def take(self) -> Any:
        """Return the state: what `getstate` returns, or the memory and the number kept back."""
        if self._memory is None:
            return self._generator.getstate()
        few, kept_back = self._few.raw, self._generator.gauss_next
        if few != self._seen or kept_back != self._last[1]:
            self._seen, self._last = few, (self._memory.raw, kept_back)
        return self._last

    def put_back(self, state: Any) -> None:
        """Go back to what `take` has returned."""
        self._generator.setstate(self.told(state))

    def told(self, state: Any) -> Any:
        """Return what `take` has returned as `getstate` tells it."""
        return state if self._memory is None else _as_told(*state)

    def _agrees(self) -> bool:
        return bool(_as_told(*self.take()) == self._generator.getstate())


def _as_told(memory: bytes, kept_back: float | None) -> Any:
    """Return the state as `random.getstate` tells it."""
    index, *words = _LAYOUT.unpack(memory)
    return _VERSION, (*words, index), kept_back


class _Numpy:
    """The generator behind `numpy.random.rand()`; those that a program makes are its own."""

    def __init__(self) -> None:
        self._of: Any = None  # the bit generator that `_few` is of; a program may set another
        self._few: _Memory | None = None
        self._seen = b""
        self._last: Any = None

    def take(self) -> Any:
        """Return the state, as numpy tells it."""
        numpy = sys.modules.get("numpy")
        module = getattr(numpy, "random", None)
        if module is None:  # not imported, or about to be
            return None
        generator = module.get_bit_generator()
        if generator is not self._of:
            self._of, self._few, self._last = generator, self._few_of(generator), None
        if self._few is None:
            return module.get_state(legacy=False)
        few = self._few.raw
        if self._last is None or few != self._seen or self._last["has_gauss"]:
            self._seen, self._last = few, module.get_state(legacy=False)
        return self._last

    def _few_of(self, generator: Any) -> _Memory | None:
        """Return the last words and, behind them, the index."""
        if type(generator).__name__ != "MT19937":
            return None
        return _at(generator.ctypes.state_address + _LAYOUT.size - _FEW, _FEW)


class _Torch:
    """The generator behind `torch.rand()` and its like, on the CPU."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._few, self._kept_back = _looked_at(generator)
        self._seen: tuple[bytes, bytes] | None = None
        self._last: torch.Tensor
        self._is_read = _every_draw_shows()

    def is_read(self) -> bool:
        """Return whether memory tells when it has been drawn from."""
        return self._is_read

    def take(self) -> torch.Tensor:
        """Return the state: the tensor of before where nothing was drawn."""
        seen = self._few.raw, self._kept_back.raw
        if seen != self._seen or not self._is_read:
            self._seen, self._last = seen, self._generator.get_state()
        return self._last


def _looked_at(generator: Any) -> tuple[_Memory, _Memory]:
    """Return what changes with each draw: one of the two, or both."""
    (few, few_size), (kept_back, kept_back_size) = _TORCH_FEW, _TORCH_KEPT_BACK
    address = generator._cdata
    return _at(address + few, few_size), _at(address + kept_back, kept_back_size)


def _every_draw_shows() -> bool:
    """Return whether that is so: also of a number kept back, and of as many as there are words."""
    generator = torch.Generator()
    few, kept_back = _looked_at(generator)
    for size, dtype in ((1, torch.float32), (1, torch.float64), (_WORDS, torch.float32)):
        for draw in (torch.rand, torch.randn, torch.randn):
            seen = few.raw, kept_back.raw
            draw(size, dtype=dtype, generator=generator)
            if (few.raw, kept_back.raw) == seen:
                return False
    return True


def _at(address: int, size: int) -> _Memory:
    return (ctypes.c_char * size).from_address(address)


_python = _Python(random._inst)
_numpy = _Numpy()
_torch = _Torch(torch.default_generator)
_last = States(None, None)
