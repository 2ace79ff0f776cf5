"""The parameters that asynchronous workers share, the optimizer that changes them, and the order.

Nothing here waits: an update that has to wait for slower workers is kept, and its worker asks
again. Asked by the thread that serves and by the main thread of the same rank, under one lock.
"""

import copy
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer

from nbdist.engine.averaging.staleness import Staleness, Update, is_feasible, may_apply
from nbdist.engine.compat import torch_hooks

KEPT = 100_000  # updates whose order is kept

Status = Literal["wait", "done", "all done"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a worker.

    Attributes:
        status: "wait": ask again. "done": the update was applied, or dropped, or training is over
            and some ranks have left it; "all done": it is over on every rank.
        version: Of the parameters.
        staleness: Of all updates, and of this worker's.
        parameters: Copies, unless it waits.
    """

    status: Status
    version: int
    staleness: Staleness
    parameters: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Gradients:
    """A worker's message: its version, a learning rate per group, a gradient per parameter."""

    read: int
    rates: Sequence[float]
    values: Sequence[torch.Tensor | None]


class Master:
    """One server's state.

    Attributes:
        version: Updates applied so far.
        order: The newest of them, oldest first.
    """

    def __init__(self, optim: Optimizer, workers: Iterable[int], bound: int | None) -> None:
        # A copy with its own parameters: this rank's main thread trains on the model's.
        self.optim = _copied(optim)
        self.workers = frozenset(workers)
        self.bound = bound
        self.version = 0
        self.order: deque[Update] = deque(maxlen=KEPT)
        self._total = self._max = self._dropped = 0
        self._reads = dict.fromkeys(self.workers, 0)  # that are outstanding
        self._waiting: dict[int, Gradients] = {}
        self._newest: dict[int, int] = {}  # each worker's last staleness
        self._left: dict[int, int] = {}  # the last cell that ended on each rank
        self._finished: set[int] = set()  # that wait for the others to finish
        self._to_notify: set[int] = set()  # training is over, and they are not notified yet
        self._is_whole = False  # every rank has finished, none has merely left
        self._lock = threading.RLock()

    def update(self, worker: int, gradients: Gradients) -> Answer:
        """Take a worker's gradients; they are applied as soon as the bound allows."""
        with self._lock:
            self._left.pop(worker, None)
            self._finished.discard(worker)
            others = {w: r for w, r in self._reads.items() if w != worker}
            if is_feasible(self.version, [*others.values(), gradients.read], self.bound):
                self._reads[worker] = gradients.read
                self._waiting[worker] = gradients
            else:
                self._dropped += 1
            return self.ask(worker)

    def ask(self, worker: int) -> Answer:
        """Return whether a worker's last update has been applied, with the newest parameters."""
        with self._lock:
            self._settle()
            if worker in self._waiting:
                return self._answer(worker, "wait")
            self._reads[worker] = self.version
            return self._answer(worker, "done")

    def finish(self, worker: int, cell: int) -> Answer:
        """Count a worker as finished; it waits for all whose cell has not ended."""
        with self._lock:
            if worker not in self._to_notify:
                self._forget(worker)
                self._finished.add(worker)
                self._settle()
                gone = {w for w, ended in self._left.items() if ended >= cell}
                if not self._to_notify and self._finished | gone >= self.workers:
                    self._to_notify, self._finished = self._finished, set()
                    self._is_whole = self._to_notify == self.workers
            if worker not in self._to_notify:
                return self._answer(worker, "wait")
            self._to_notify.discard(worker)
            self._left.pop(worker, None)
            return self._answer(worker, "all done" if self._is_whole else "done")

    def is_notified(self) -> bool:
        """Return whether every rank that finished has been notified that training is over."""
        with self._lock:
            return not self._to_notify

    def leave(self, worker: int, cell: int) -> None:
        """Stop waiting for this worker in this cell; its next update brings it back."""
        with self._lock:
            self._forget(worker)
            self._to_notify.discard(worker)
            self._left[worker] = cell
            self._settle()

    def restart(self) -> None:
        """Forget what was under way: a fault has ended it on every rank."""
        with self._lock:
            self._to_notify.clear()
            for worker in self.workers:
                self._forget(worker)

    @torch.no_grad()
    def begin_from(self, weights: Sequence[torch.Tensor]) -> None:
        """Begin from these weights, with no update made and nothing remembered of any."""
        with self._lock:
            self.restart()
            torch._foreach_copy_([p.detach() for p in self._parameters()], list(weights))
            self.optim.state.clear()
            self.version = self._total = self._max = self._dropped = 0
            self.order.clear()
            self._newest.clear()
            self._left.clear()
            self._reads = dict.fromkeys(self.workers, 0)

    def like(self) -> tuple[int, list[torch.Tensor]]:
        """Return the number of parameter groups, and the parameters."""
        return len(self.optim.param_groups), self._parameters()

    def state_dict(self) -> dict[str, object]:
        """Return the state of the optimizer."""
        with self._lock:
            return copy.deepcopy(self.optim.state_dict())

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Give the optimizer a state."""
        with self._lock:
            self.optim.load_state_dict(state)

    def _forget(self, worker: int) -> None:
        self._reads.pop(worker, None)
        self._waiting.pop(worker, None)
        self._finished.discard(worker)

    def _settle(self) -> None:
        """Apply the updates that may be applied, the oldest first."""
        if self._to_notify:
            return  # all must get the parameters with which training has ended
        while True:
            ready = [w for w in self._waiting if self._may_apply(w)]
            if not ready:
                return
            worker = min(ready, key=lambda w: (self._reads[w], w))
            self._apply(worker, self._waiting.pop(worker))

    def _may_apply(self, worker: int) -> bool:
        return may_apply(worker, self.version, self._reads, self.bound)

    def _apply(self, worker: int, gradients: Gradients) -> None:
        for group, rate in zip(self.optim.param_groups, gradients.rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        for parameter, gradient in zip(self._parameters(), gradients.values, strict=True):
            parameter.grad = gradient
        torch_hooks.step_without_hooks(self.optim)
        self.optim.zero_grad()
        self.version += 1
        update = Update(worker, self._reads.pop(worker), self.version)
        self.order.append(update)
        self._newest[worker] = update.staleness
        self._total += update.staleness
        self._max = max(self._max, update.staleness)

    def _answer(self, worker: int, status: Status) -> Answer:
        newest = self._newest.get(worker)
        staleness = Staleness(self.version, self._total, self._max, newest, self._dropped)
        if status == "wait":
            return Answer(status, self.version, staleness)
        copies = tuple(p.detach().clone() for p in self._parameters())
        return Answer(status, self.version, staleness, copies)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optim.param_groups for p in group["params"]]


def _copied(optim: Optimizer) -> Optimizer:
    """Return a copy with parameters of its own.

    torch's optimizers leave all but groups and state out of a copy: a class's own fields, too.
    """
    memo: dict[int, object] = {}
    copied = copy.deepcopy(optim, memo)
    for name, value in vars(optim).items():
        # What can be called belongs to the original: a scheduler puts its own `step` there.
        if not hasattr(copied, name) and not callable(value):
            setattr(copied, name, copy.deepcopy(value, memo))
    return copied
