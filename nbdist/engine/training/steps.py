"""Decide which call of which optimizer ends a training step, and the size of a batch."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_INDEXES = (torch.int64, torch.int32)
TURNS = 3  # of optimizers, after which they are known to step in turn
MAX_AHEAD = 2  # batches that Lightning or Accelerate fetch ahead


class StepRule:
    """Find the optimizer whose `step()` ends a training step, of several.

    The optimizer that steps last in an iteration leads: each of its steps is a training step, and
    those of others before it (a GAN's second network, one optimizer a parameter) belong to it.
    It is known when the first one steps again: that led so far, and hands over to the
    last that stepped in between. So the first step ends early, with the first optimizer, and
    `is_open` until the leader's next call: the others' calls until then belong to it.

    One that steps twice between two steps of the leader takes the lead (a warm-up is over, or one
    network steps several times for each step of the other). It keeps the lead, unless they had
    stepped in turn: then a GradScaler has skipped a step, and the last one is found again. One that
    was made since the newest step ended leads at once: another training begins.
    """

    def __init__(self) -> None:
        self._leader: int | None = None
        self._others: list[int] = []  # that have stepped since the leader did, in order
        self._turns = 0  # steps of the leader with others in between
        self.is_open = False  # whether the newest step may have more to come

    @property
    def is_between(self) -> bool:
        """Whether the newest call belongs to a step that has yet to end."""
        return bool(self._others) and not self.is_open

    def leads(self, optimizer: int) -> bool:
        """Return whether a call is the leader's: then it ends a step, as `closes` would return."""
        if optimizer != self._leader or self.is_open:
            return False
        if self._others:
            self._others.clear()
            self._turns += 1
        return True

    def closes(self, optimizer: int, *, is_new: bool = False) -> bool:
        """Return whether this call, by the optimizer of that `id`, ends a step.

        Args:
            optimizer: Which.
            is_new: It was made after the newest step had ended.
        """
        if optimizer == self._leader and self.is_open and self._others:
            self._leader, self._others, self.is_open = self._others[-1], [optimizer], False
            return False
        is_first = is_new or self._leader is None
        if is_first:
            self._turns = 0
        if is_first or optimizer == self._leader or optimizer in self._others:
            had_turns = optimizer in self._others and self._turns >= TURNS
            self._leader, self.is_open = optimizer, is_first or had_turns
            self._others.clear()
            return True
        self._others.append(optimizer)
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


def take_used(fetched: deque[T], backwards: int) -> list[T]:
    """Remove the batches that a step used from those fetched, and return them.

    A step uses one batch a backward; frameworks fetch one or two ahead, and those stay. Where
    several backwards use one batch, or one uses several, the number fetched decides.
    """
    count = max(1, backwards, len(fetched) - MAX_AHEAD)
    return [fetched.popleft() for _ in range(min(count, len(fetched)))]


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a batch: samples, and tokens if it is text; 0 if there are none."""

    samples: int
    tokens: int


def size_of(batch: Any) -> Size:
    """Return the size of a batch.

    Samples: the first dimension of its first tensor that has one. Tokens: the elements of its first
    tensor of two dimensions or more whose numbers an embedding takes, int32 or int64; so pixels and
    masks are none.
    """
    samples = tokens = 0
    for tensor in _tensors(batch, 3):
        shape = tensor.shape
        if not samples and shape:
            samples = shape[0]
        if len(shape) > 1 and tensor.dtype in _INDEXES:
            tokens = tensor.numel()
            break
    return Size(samples, tokens)


def _tensors(batch: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth and isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part, depth - 1)
    elif depth and isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part, depth - 1)


PACE_STEPS = 50  # that are considered


class Pace:
    """The pace of one rank over its last steps, also those of earlier cells.

    The samples a second that it processes by itself: forward, backward and data. Waiting for
    other ranks does not count, and the optimizer's step takes as long for any batch.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=PACE_STEPS)
        self._rest_s: deque[float] = deque(maxlen=PACE_STEPS)

    def note(self, values: Mapping[str, float]) -> None:
        """Add a step's values; one without samples or `comm_s` is ignored."""
        own_s = values.get("compute_s", 0.0) + values.get("data_s", 0.0)
        if "comm_s" in values and "samples" in values and own_s > 0:
            self._seen.append(values["samples"] / own_s)
        if "step_s" in values and "data_s" in values:
            self._rest_s.append(values["step_s"] - values["data_s"])

    def now(self) -> float:
        """Return samples a second, the median of steps; 0 while it is not known."""
        return median(self._seen) if len(self._seen) > 2 else 0.0

    def rest_s(self) -> float:
        """Return the seconds of a step without its waits for data, the median; 0: not known."""
        return median(self._rest_s) if len(self._rest_s) > 2 else 0.0
