"""What one process computes of a trial: the model that ranks train together, a step at a time.

Plain torch, no process group and nothing of nbdist: each rank's share goes through the one model,
and gradients are averaged. A state is kept of each step, for a fault may leave ranks at an earlier
one. float64: sums in another order differ by less than `TOLERANCE`.
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.random import cells
from tests.random.acts import GLOBAL_BATCH, STEPS_OF_EPOCH, Model
from tests.random.data import Noise, batch, dataset, noise
from tests.random.layouts import shares

TOLERANCE = 1e-9


@dataclass(frozen=True)
class State:
    """A model after `made` steps, `by_optimizer` of them of the optimizer that there is."""

    made: int
    by_optimizer: int
    parameters: Mapping[str, torch.Tensor]
    rest: Any
    noise: Any


class Shadow:
    """One model, whatever its names on the ranks. `members` are the ranks that train it."""

    def __init__(self, model: Model, members: Sequence[int]) -> None:
        self.model = model
        self.members = tuple(members)
        self.trouble = ""  # why its use may be refused
        self.is_torn = False  # ranks made a part of a step each, of which there is no whole
        names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "__name__": "shadow"}
        with torch.random.fork_rng():
            exec(cells.plain_model(model), names)
        self._module: nn.Module = names[model.name]
        self._data = dataset(model.seed)
        self._noise: Noise | None = None
        self.made = 0
        self.renew_optimizer()

    def renew_optimizer(self) -> None:
        """Begin with a new optimizer at the step where the model is."""
        kind, options = cells.OPTIMIZER[self.model.optimizer]
        self._optimizer = eval(f"{kind}(parameters, {options})", None, self._names())
        self._plan: Any = None
        if self.model.has_schedule:
            self._plan = eval(
                cells.scheduler(self.model, "optimizer"),
                {"torch": torch, "optimizer": self._optimizer},
            )
        self._by_optimizer = 0
        self.history = {self.made: self.state()}

    def _names(self) -> dict[str, Any]:
        return {"torch": torch, "parameters": list(self._module.parameters())}

    @property
    def is_split(self) -> bool:
        """Whether a rank that dies takes a part of the optimizer with it, and no other part."""
        return self.model.spread.is_split

    @property
    def is_sharded(self) -> bool:
        """Whether a rank that dies takes a part of the model with it."""
        return self.model.spread.is_sharded

    def seed(self, noise: int) -> None:
        """Draw from generators with this seed from now on; 0: from none."""
        self._noise = Noise(noise) if noise else None

    def state(self) -> State:
        """Return where it stands."""
        parts = (self._module, self._optimizer, self._plan)
        rest = copy.deepcopy([part.state_dict() if part else None for part in parts])
        parameters = {name: p.detach().clone() for name, p in self._module.named_parameters()}
        noise = self._noise.state() if self._noise else None
        return State(self.made, self._by_optimizer, parameters, rest, noise)

    def put(self, state: State) -> None:
        """Go back, or on, to a state."""
        for part, saved in zip(
            (self._module, self._optimizer, self._plan), copy.deepcopy(state.rest), strict=True
        ):
            if part is not None:
                part.load_state_dict(saved)
        if self._noise is not None and state.noise is not None:
            self._noise.put(state.noise)
        self.made, self._by_optimizer = state.made, state.by_optimizer
        self.history = {k: s for k, s in self.history.items() if k <= state.made}
        self.history[state.made] = state

    def train(self, steps: int, begin: int | None = None) -> list[State]:
        """Make steps, on the data from `begin` on; return the states from before the first on."""
        states = [self.state()]
        ahead = 0 if begin is None else begin - self.made
        with torch.random.fork_rng():
            for _ in range(steps):
                self._step(self.made + ahead)
                states.append(self.state())
        self.history |= {state.made: state for state in states}
        return states

    def _step(self, step: int) -> None:
        drawn = 0.1 * self._noise.draw() if self._noise else 0.0
        seen = shares(self.model.layout, self.members)
        for place, share in enumerate(seen):
            if self.model.architecture == "dropout":
                torch.manual_seed(noise(self.model.seed, step, share))
            x, y = self._share(step, share, place, len(seen))
            if self.model.architecture == "attention":
                x, y = x[None], y[None]
            (F.mse_loss(self._module(x + drawn), y) / len(seen)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._plan is not None:
            self._plan.step()
        self.made += 1
        self._by_optimizer += 1

    def _share(self, step: int, share: int, place: int, count: int) -> tuple[torch.Tensor, ...]:
        if self.model.data != "loader":
            return batch(self.model.seed, step, share)
        epoch, nth = divmod(step, STEPS_OF_EPOCH)
        order = _order(self.model, epoch)
        size = GLOBAL_BATCH // count
        first = nth * GLOBAL_BATCH + place * size
        x, y = self._data[order[first : first + size]]
        return x, y


def _order(model: Model, epoch: int) -> torch.Tensor:
    """Return the order of a loader's samples in an epoch, which follows from seed and epoch."""
    samples = STEPS_OF_EPOCH * GLOBAL_BATCH
    if model.seed % 2 == 0:
        return torch.arange(samples)
    digest = hashlib.blake2b(repr((model.seed, epoch)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randperm(samples, generator=generator)


def is_at(state: State, seen: Mapping[str, Any]) -> bool:
    """Return whether what a rank holds (see `on_rank.look`) is of a state, but for rounding."""
    if not seen or not set(seen) <= set(state.parameters):
        return False
    for name, (numbers, cuts) in seen.items():
        expected = state.parameters[name]
        for dim, place, places in cuts:
            parts = torch.chunk(expected, places, dim)
            expected = parts[place] if place < len(parts) else expected.narrow(dim, 0, 0)
        held = torch.tensor(numbers, dtype=torch.float64)
        if held.numel() != expected.numel():
            return False
        error = (held - expected.flatten()).abs()
        if not (error <= TOLERANCE * (1 + expected.flatten().abs())).all():
            return False
    return True


def named(states: Mapping[str, Shadow], seen: Mapping[str, Any]) -> str:
    """Return which model's state a rank holds instead, for people; empty when none's."""
    for name, shadow in states.items():
        for made, state in shadow.history.items():
            if is_at(state, seen):
                return f"{name} at step {made}"
    return ""
