"""A trial while it runs: its session, its ranks, groups and models, and a look at all of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist import Session
from tests.random import cells, sentences
from tests.random.acts import DEADLY, NO_FAULT, Act, Model
from tests.random.calls import Calls, Driven, Lost, Ran
from tests.random.held import Held


@dataclass
class Members:
    """A group of ranks; `trouble` says why its use may be refused."""

    ranks: tuple[int, ...]
    trouble: str = ""


class World:
    """What there is, and what should be. Main thread, which a trial interrupts.

    Attributes:
        n: How many ranks there are.
        groups: By name.
        models: The last of each name.
        is_uneven: Ranks do not hold the same models.
    """

    def __init__(self, n: int, calls: Calls) -> None:
        """Begin with a session of `n` ranks that hold nothing."""
        self.calls = calls
        self.held = Held(calls)
        self.n = n
        self.groups: dict[str, Members] = {}
        self.models: dict[str, Model] = {}
        self.is_uneven = False
        self._pids = self._pids_now()

    @property
    def session(self) -> Session:
        """The trial's."""
        return self.calls.session

    @property
    def driven(self) -> Driven:
        """What has come of it so far."""
        return self.calls.driven

    def begin(self, act: Act) -> None:
        """Begin with an act: nothing has changed by it."""
        self.calls.begin(act)
        self.held.allowed = {}

    def make_group(self, name: str, ranks: Sequence[int]) -> None:
        """Make a group of those ranks that there are."""
        ranks = tuple(r for r in ranks if r < self.n) or (0,)
        self.calls.ran_well(f"{name} = dist.new_group({list(ranks)})")
        self.groups[name] = Members(ranks)

    def members(self, model: Model) -> tuple[int, ...]:
        """Return the ranks that train a model; makes its group where there is none."""
        if model.group is None:
            return tuple(range(self.n))
        group = self.groups.get(model.group)
        if group is None or group.trouble:
            ranks = (0, self.n - 1) if group is None else group.ranks
            self.make_group(model.group, tuple(sorted({min(r, self.n - 1) for r in ranks})))
        return self.groups[model.group].ranks

    def call_well(self, call: Callable[[], Any]) -> Ran:
        """Call the session for what has no reason to fail; keeps the sentences it returns."""
        ran = self.calls.call(call)
        if ran.error is not None:
            self.calls.find("an error without a fault", ran.text)
        said = "\n".join(map(str, ran.result or ()))
        self.calls.text += said
        self.driven.story += [f"# {line}" for line in said.splitlines()]
        return ran

    def replacements(self) -> set[int]:
        """Return the ranks that have other processes than when all were looked at last."""
        return {rank for rank, pid in self._pids_now().items() if self._pids.get(rank) != pid}

    def look(self) -> None:
        """Compare what every rank holds with what the shadows allow."""
        names = [name for name in self.held.names if name not in self.held.unsure]
        code = cells.look(names, list(self.held.variables))
        ran = self.calls.run(code, is_told=False)
        if ran.error is not None or ran.result is None:
            self.calls.find("a lost session", ran.text)
            raise Lost
        replacements = self.replacements()
        self._pids = self._pids_now()
        fault = self.calls.row.fault
        may_cost = fault in DEADLY or fault.startswith(("idle", "restart", "scale"))
        if replacements and not may_cost:
            self.calls.find("a process was lost", f"of {sorted(replacements)}, by {fault}")
        seen = {rank: json.loads(part.value) for rank, part in ran.result.items()}
        self.held.compare(seen, replacements)
        for group in self.groups.values():
            if set(group.ranks) <= replacements:
                group.trouble = group.trouble or "all its ranks died"
        if not replacements and fault == NO_FAULT.kind:
            for text in sentences.false_loss(self.calls.text, set()):
                self.calls.find("a false sentence", text)

    def _pids_now(self) -> dict[int, int]:
        return {rank: state.pid for rank, state in self.session._cluster.ranks.items()}
