"""Busy neighbours: as many processes that spin as the machine has cores."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator

from tests.benchmarks.table import Row

# It ends with the one that started it, however that ends.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def neighbours() -> Iterator[None]:
    """Keep every core busy meanwhile."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def named_busy(rows: Iterable[Row]) -> list[Row]:
    """Return rows that were measured so. The goals suppose free cores: these have none."""
    return [
        dataclasses.replace(row, what=f"{row.what}, busy neighbours", goal=None) for row in rows
    ]
