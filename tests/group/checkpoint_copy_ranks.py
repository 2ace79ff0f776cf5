"""On the ranks of test_checkpoint_copies: saves whose copies are made as late as they may be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import nbdist
from nbdist.engine.checkpoint import save
from nbdist.engine.checkpoint.steady import Copying, Staged
from nbdist.engine.compat import torch_hooks
from tests.group.checkpoint_ranks import State, Training
from tests.group.parity_cases import Case


@contextmanager
def as_late_as_can_be() -> Iterator[list[int]]:
    """Have threads copy when a step waits for it, and no sooner; gives how many tensors."""
    is_waited_for = Event()
    left: list[int] = []
    copy_rest, settle = Staged.copy_rest, Copying.settle

    def late(staged: Staged) -> int:
        is_waited_for.wait()
        left.append(copy_rest(staged))
        return left[-1]

    def waited_for(copying: Copying) -> None:
        is_waited_for.set()
        settle(copying)
        is_waited_for.clear()

    with (
        mock.patch.object(Staged, "copy_rest", late),
        mock.patch.object(Copying, "settle", waited_for),
    ):
        yield left


def save_each_step(
    folder: str, case: Case, steps: int, after: Callable[[Training], Any] | None = None
) -> dict[str, Any]:
    """Save after each step, whose copies are made when the next begins.

    Returns:
        The weights at each save; how many tensors were left for later by each; what was said.
    """
    training = Training(case)
    training.train(1)  # an optimizer's first step is seen
    nbdist.save(f"{folder}-waited", wait=True)  # which copies nothing
    weights: list[State] = []
    savings = []
    with as_late_as_can_be() as left:
        for _ in range(steps):
            weights.append(training.weights())
            savings.append(nbdist.save(folder, keep=None))
            if after is not None:
                after(training)
            training.train(1)
        save.here.settle()
    training.end()
    return {"weights": weights, "left": left, "errors": [str(s.error or "") for s in savings]}


def restored(folder: str, case: Case, steps: list[int]) -> list[State]:
    """Return the weights of the checkpoints of these steps."""
    training = Training(case, seed=100 + dist.get_rank())
    found = []
    for step in steps:
        nbdist.restore(folder, which=step)
        found.append(training.weights())
    training.end()
    return found


def clip_unseen(training: Training) -> None:
    """Change weights as many do it, so that torch counts no version."""
    for parameter in training.layout.model.parameters():
        torch_hooks.local_part(parameter).data.mul_(0.5)


def change(training: Training) -> None:
    """Change a weight, as no step does."""
    with torch.no_grad():
        next(iter(training.layout.model.parameters())).mul_(0.5)


class Once:
    """Does something at one of its calls."""

    def __init__(self, number: int, action: Callable[[Training], Any]) -> None:
        self._number, self._action, self._calls = number, action, 0

    def __call__(self, training: Training) -> None:
        self._calls += 1
        if self._calls == self._number:
            self._action(training)


def folders(folder: str) -> list[str]:
    """Return the checkpoints that count."""
    return sorted(path.parent.name for path in Path(folder).glob("*/checkpoint.json"))
