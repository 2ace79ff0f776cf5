"""Report from which state random numbers were drawn while a batch was made in this process.

Ranks whose generators are in one state augment different samples alike. What workers draw is not
seen. Main thread, in steps that are observed.
"""

import random
import sys
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch

from nbdist.engine.compat import torch_hooks

_BYTES = 6  # a float holds them exactly


class Draws:
    """The generators that were drawn from for the batches of one step."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._drawn: dict[str, float] = {}

    def fetch_begins(self) -> None:
        """A batch is asked for."""
        self._before = dict(_states()) if torch.is_grad_enabled() else {}

    def fetch_ended(self, iterator: Any) -> None:
        """It is there. Before a pass's first one a sampler may draw a seed, which is no batch's."""
        if self._before and torch_hooks.batch_number(iterator) > 1:
            after = dict(_states())
            for name, state in self._before.items():
                if after.get(name, state) != state:
                    self._drawn.setdefault(name, state)
        self._before = {}

    def take(self) -> dict[str, float]:
        """Return, by generator, a number of its state before it was drawn from; begin anew."""
        found, self._drawn = self._drawn, {}
        return {f"drawn_{name}": state for name, state in found.items()}


def _states() -> Iterator[tuple[str, float]]:
    yield "torch", _number(torch.get_rng_state().numpy().tobytes())
    yield "python", _number(repr(random.getstate()[1]).encode())
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    if numpy is not None:
        inner = dict(numpy.get_state(legacy=False)["state"])
        words = inner.pop("key", None)  # of an MT19937; a program may set another generator
        yield "numpy", _number(repr(inner).encode(), b"" if words is None else words.tobytes())


def _number(*parts: bytes) -> float:
    digest = blake2b(b"".join(parts), digest_size=_BYTES).digest()
    return float(int.from_bytes(digest, "little"))
