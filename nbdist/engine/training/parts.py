"""Divide the main thread's time of a step into parts: a state machine on times and events. Pure.

The parts:

- *data*: within a DataLoader's `next`;
- *backward*: within an outermost `backward()`; optimizers that step within it left out;
- *optimizer*: within the outermost optimizer's `step()`, its closure left out;
- *forward* or *other*: between those. It is forward when a backward comes next, else (a batch, an
  optimizer, the closure's end) other. So the batches of an evaluation are other, and so is what
  follows a backward, unless one more backward follows.

Two cases need a rule. *Which loader trains:* one whose batch was the last before a backward, or of
which exactly one batch was taken, and more were to come, since the backward or step before, and
with gradients enabled; time in any other (an evaluation's) is other. *Gradients without a
backward* (`torch.autograd.grad`, zero-bubble pipelines): an optimizer that is called with a fresh
batch, or twice in a row, and saw none, has its gradients from elsewhere: the time before it is
forward.

Time blocked in collectives is subtracted from its part. The parts and it sum to the step.

All moments and times are nanoseconds. `blocked_ns` is the blocked time since the step began.
"""

FORWARD, BACKWARD, DATA, OPTIMIZER, OTHER, OPEN = range(6)


class PartTimer:
    """The parts of the current step. Every method on the main thread."""

    def __init__(self) -> None:
        self._at = OTHER
        self._since_ns = 0
        self._blocked_ns = 0
        self._clock = [0] * 6
        self._waited = [0] * 6
        self._depth = 0  # optimizers whose step runs: some step others, or call their class's
        self._last_optimizer: int | None = None
        self._is_in_closure = False
        self._returns_to = OPEN  # when that step has ended
        self._has_gradients = False  # a backward was seen since the last optimizer's end
        self._loader = 0  # the newest asked
        self._taken: dict[int, int] = {}  # batches of each loader since the last backward or step
        self._trains: set[int] = set()
        self._undecided: dict[int, tuple[int, int]] = {}  # clock and waited of each other loader

    def begin(self, now_ns: int) -> None:
        """A step begins whose predecessor was not seen."""
        self._since_ns, self._blocked_ns, self._at = now_ns, 0, OPEN
        self._clock, self._waited = [0] * 6, [0] * 6
        self._undecided.clear()

    def begin_next(self, now_ns: int) -> None:
        """A step begins at the end of one that was not measured."""
        self.begin(now_ns)
        self._has_gradients = False
        self._taken.clear()

    def enter_optimizer(self) -> bool:
        """An optimizer steps, in a step that is not measured; returns as `optimizer_began`."""
        self._depth += 1
        return self._depth == 1

    def enter_closure(self, is_in: bool) -> None:
        """It calls its closure, or the closure has ended; in a step that is not measured."""
        self._is_in_closure = is_in

    def leave_optimizer(self, optimizer: int) -> bool:
        """An optimizer has stepped, in an unmeasured step; returns as `optimizer_ended`."""
        self._depth -= 1
        if self._depth > 0:
            return False
        self._depth, self._last_optimizer, self._is_in_closure = 0, optimizer, False
        return True

    def fetch_began(self, now_ns: int, blocked_ns: int) -> None:
        """A loader is asked for a batch."""
        self.forget_failed()
        self._turn(now_ns, blocked_ns, DATA)
        self._settle(OTHER)

    def fetch_ended(self, now_ns: int, blocked_ns: int, loader: int, *, may_train: bool) -> None:
        """It returned one, or is exhausted; `loader` is its unique number.

        `may_train` is False at the end, and when the batch cannot produce gradients.
        """
        if loader not in self._trains:
            clock, waited = self._undecided.get(loader, (0, 0))
            clock += now_ns - self._since_ns
            waited += blocked_ns - self._blocked_ns
            self._undecided[loader] = (clock, waited)
            self._since_ns, self._blocked_ns = now_ns, blocked_ns
        self._turn(now_ns, blocked_ns, OPEN)
        self._loader = loader
        self._taken[loader] = self._taken.get(loader, 0) + (1 if may_train else 2)
        if not may_train:
            self._loader = 0

    def backward_began(self, now_ns: int, blocked_ns: int) -> None:
        """An outermost backward begins."""
        self.forget_failed()
        self._turn(now_ns, blocked_ns, BACKWARD)
        self._settle(FORWARD)
        self._has_gradients = True
        if self._taken:
            self._trains.update(loader for loader, n in self._taken.items() if n == 1)
            if self._loader:
                self._trains.add(self._loader)
            self._taken.clear()

    def backward_ended(self, now_ns: int, blocked_ns: int) -> None:
        """It has ended; `blocked_ns` includes all its waits."""
        self._turn(now_ns, blocked_ns, OPEN)
        self._has_gradients = True  # again, if an optimizer has stepped meanwhile

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer is in its step."""
        return self._depth > 0

    def optimizer_began(
        self, now_ns: int, blocked_ns: int, optimizer: int, *, has_closure: bool
    ) -> bool:
        """An optimizer steps; returns False where it does so within the step of another."""
        self._depth += 1
        if self._depth > 1:
            return False
        self._returns_to = BACKWARD if self._at == BACKWARD else OPEN
        self._turn(now_ns, blocked_ns, OPTIMIZER)
        if not has_closure:  # otherwise the closure decides
            is_fed = bool(self._taken) or optimizer == self._last_optimizer
            self._settle(FORWARD if is_fed and not self._has_gradients else OTHER)
        self._is_in_closure = False
        return True

    def closure_began(self, now_ns: int, blocked_ns: int) -> None:
        """The optimizer calls for loss and gradients."""
        self._turn(now_ns, blocked_ns, OPEN)
        self._is_in_closure = True

    def closure_ended(self, now_ns: int, blocked_ns: int) -> None:
        """The closure has returned."""
        self._turn(now_ns, blocked_ns, OPTIMIZER)
        self._settle(OTHER if self._has_gradients else FORWARD)
        self._is_in_closure = False

    def optimizer_ended(self, now_ns: int, blocked_ns: int, optimizer: int) -> bool:
        """An optimizer has stepped; returns False as `optimizer_began`."""
        if self._depth > 1:
            self._depth -= 1
            return False
        self._turn(now_ns, blocked_ns, self._returns_to if self._depth else OPEN)
        self._depth, self._last_optimizer = 0, optimizer
        self._is_in_closure = self._has_gradients = False
        self._taken.clear()
        return True

    def close(self, now_ns: int, blocked_ns: int) -> dict[str, float]:
        """End the step and return its parts in seconds; the next one begins, nothing blocked."""
        self._turn(now_ns, blocked_ns, self._at)
        self._settle(OTHER)
        clock, waited = self._clock, self._waited
        for loader, (spent, blocked) in self._undecided.items():
            part = DATA if loader in self._trains else OTHER
            clock[part] += spent
            waited[part] += blocked
        self._undecided.clear()
        self._clock, self._waited, self._blocked_ns = [0] * 6, [0] * 6, 0
        # Blocked time that is found afterwards (DDP's, at the end of a backward that an
        # optimizer's step has cut) may be more than this part has lasted.
        own = [a - b if a > b else 0 for a, b in zip(clock, waited, strict=True)]
        forward, backward, data, optimizer, other, _ = own
        step = sum(clock)
        return {
            "step_s": step / 1e9,
            "compute_s": (forward + backward) / 1e9,
            "comm_s": (step - sum(own)) / 1e9,
            "data_s": data / 1e9,
            "optimizer_s": optimizer / 1e9,
            "other_s": other / 1e9,
            "forward_s": clock[FORWARD] / 1e9,
            "backward_s": clock[BACKWARD] / 1e9,
            "forward_comm_s": (clock[FORWARD] - own[FORWARD]) / 1e9,
        }

    def _turn(self, now_ns: int, blocked_ns: int, to: int) -> None:
        """End the present part; `to` begins."""
        at = self._at
        self._clock[at] += now_ns - self._since_ns
        self._waited[at] += blocked_ns - self._blocked_ns
        self._since_ns, self._blocked_ns, self._at = now_ns, blocked_ns, to

    def _settle(self, part: int) -> None:
        """Count the open time as `part`."""
        clock, waited = self._clock, self._waited
        clock[part] += clock[OPEN]
        waited[part] += waited[OPEN]
        clock[OPEN] = waited[OPEN] = 0

    def forget_failed(self) -> None:
        """Forget an optimizer's step that raised, while the loop continues."""
        if not self._is_in_closure:
            self._depth = 0


def with_stream(parts: dict[str, float], stream_ns: int) -> dict[str, float]:
    """Return a step's parts with the waits of the GPU's compute stream subtracted.

    The host was not blocked meanwhile: it queued, and waited later for the queued work. So
    the time is subtracted from `other_s` (where a loop reads its loss), then out of `compute_s`.
    The parts sum to the step as before, and `comm_s` holds no more than these had.
    """
    left = stream_ns / 1e9
    found = dict(parts)
    for part in ("other_s", "compute_s"):
        moved = min(left, found[part])
        found[part] -= moved
        found["comm_s"] += moved
        left -= moved
    return found
