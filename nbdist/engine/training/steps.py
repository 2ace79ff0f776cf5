"""Decide which call of which optimizer ends a training step, and what a batch holds."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

MAX_AHEAD = 2  # batches that Lightning or Accelerate hold, fetched and not used


class StepRule:
    """Tell the optimizer whose `step()` ends a step from those that step within it.

    The optimizer that stepped first leads: each of its steps is a training step, and those of
    others in between (a GAN's second network, the one inside a ZeroRedundancyOptimizer, one
    optimizer a parameter) belong to it. An optimizer that steps twice between two steps of the
    leader takes its place: the leader was only for a warm-up, or steps less often.
    """

    def __init__(self) -> None:
        self._leader: int | None = None
        self._others: set[int] = set()

    def closes(self, optimizer: int) -> bool:
        """Return whether this call, by the optimizer of that `id`, ends a step."""
        if self._leader is None or optimizer == self._leader or optimizer in self._others:
            self._leader = optimizer
            self._others.clear()
            return True
        self._others.add(optimizer)
        return False


def steps_in_pass(batches: int, *, batches_taken: int, steps_made: int, backwards: int) -> int:
    """Return how many steps one pass over a loader makes, gradient accumulation included.

    Args:
        batches: In the whole pass.
        batches_taken: So far; some may have been fetched ahead.
        steps_made: So far in this pass, at least 1.
        backwards: In the newest step; several may use one batch.
    """
    batches_per_step = min(max(1, backwards), max(1, round(batches_taken / steps_made)))
    return -(-batches // batches_per_step)


def take_samples(fetched: deque[int], backwards: int) -> int:
    """Remove the batches that a step used from those fetched, and return their samples.

    A step uses one batch a backward; frameworks fetch one or two ahead, and those stay. Where
    several backwards use one batch, or one uses several, what was fetched decides.
    """
    used = 0
    count = max(1, backwards, len(fetched) - MAX_AHEAD)
    for _ in range(min(count, len(fetched))):
        used += fetched.popleft()
    return used


def samples_in(batch: Any, depth: int = 3) -> int:
    """Return the first dimension of the first tensor in a batch; 0 where there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 0
    if depth == 0 or isinstance(batch, str | bytes):
        return 0
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, list | tuple):
        parts = list(batch)
    else:
        return 0
    return next((n for n in (samples_in(part, depth - 1) for part in parts) if n), 0)
