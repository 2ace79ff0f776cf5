"""The generators that users' code draws from in this process: torch's, Python's and numpy's own.

Threads: of whoever draws.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Have all three draw from `seed` on."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def kept() -> Iterator[None]:
    """Let the process draw on after the block as if nothing had been drawn in it."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
