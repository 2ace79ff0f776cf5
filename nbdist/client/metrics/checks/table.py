"""The rules with their states, as `%dist checks` shows them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from nbdist.client.metrics.checks.rules import all_rules
from nbdist.client.metrics.checks.settings import Setting, states_of
from nbdist.shared.text import MICROSECONDS, aligned, counted, figure


@dataclass(frozen=True, slots=True)
class ChecksCost:
    """What the rules cost together in the newest training: microseconds of processor time a step.

    `rank_us` on each rank, None where no rank tells; `notebook_us` for all ranks together.
    """

    steps: int
    notebook_us: float
    rank_us: float | None = None

    def __str__(self) -> str:
        on = "" if self.rank_us is None else f"each rank {_us(self.rank_us)}, and "
        return (
            f"Together they cost {on}the notebook {_us(self.notebook_us)} for all ranks, in the "
            f"newest training, of {counted(self.steps, 'step')}."
        )


@dataclass(frozen=True, slots=True)
class Checks:
    """All rules. Prints as a table.

    Attributes:
        states: What rules do with what they find: off, warn or raise, for all or by name.
        found: What they have found in the newest cell, by rule.
        ignored: Those that the newest cell has silenced.
        failed: Those with an error of their own, which is in the notebook's log.
        cost: What they cost; None before a training.
    """

    states: Setting
    found: Mapping[str, str] = field(default_factory=dict)
    ignored: Collection[str] = ()
    failed: Collection[str] = ()
    cost: ChecksCost | None = None

    def __str__(self) -> str:
        states = states_of(self.states)
        rows = [("rule", "state", "newest cell", "what it notices")]
        rows += [
            (rule.name, states[rule.name], self._in_newest(rule.name), rule.what)
            for rule in all_rules()
        ]
        cost = (
            "What they cost is known once a cell has trained." if self.cost is None else self.cost
        )
        return "\n".join([*aligned(rows, (False,) * 4), str(cost)])

    def __repr__(self) -> str:
        return str(self)

    def _in_newest(self, name: str) -> str:
        ways = {"ignored": self.ignored, "found": self.found, "failed": self.failed}
        return next((way for way, names in ways.items() if name in names), "")


def _us(us: float) -> str:
    return f"{figure(us)} {MICROSECONDS} a step"
