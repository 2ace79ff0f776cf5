"""Pause a training at one step of all ranks, change a value there, or look at one.

Ranks agree as `engine/steps/halt.py` tells: all of them do what is asked after the same step, or
none does. What one thread asks another waits for.

Threads: any but ipyparallel's IO thread; the main one waits for the cell.
"""

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from nbdist.client.cells.params import read_param, require_params
from nbdist.client.cells.status import Status, answers
from nbdist.client.cluster.cluster import Cluster
from nbdist.client.metrics.changes import Change
from nbdist.shared import plain
from nbdist.shared.errors import ClusterError, NBDistError, UsageError
from nbdist.shared.options import is_number
from nbdist.shared.text import begin_with_ranks, name_ranks

TIMEOUT_S: Final = 60.0
LR: Final = "lr"
_LOOK_S, _LONGEST_LOOK_S = 0.01, 0.2  # between two looks: the next step may be ms or minutes away
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Paused:
    """A training that stands still after `step`, on all of `ranks`."""

    step: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"Paused after step {self.step} on {name_ranks(self.ranks)}; %dist continue goes on."


@dataclass(frozen=True, slots=True)
class Peeked:
    """What an expression gave after `step`: its text by rank, or the error of those in `errors`."""

    expression: str
    step: int
    values: Mapping[int, str]
    errors: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted({**self.values, **self.errors}.items()):
            by_text.setdefault(text, []).append(rank)
        lines = [f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
        return "\n".join([f"{self.expression} after step {self.step}:", *lines])


@dataclass(frozen=True, slots=True)
class Changed:
    """What was changed after `step` on all of `ranks`."""

    step: int
    ranks: tuple[int, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        changes = ", ".join(f"{one.name} {one.old} -> {one.new}" for one in self.changes)
        return " ".join(
            [f"{changes} on {name_ranks(self.ranks)} after step {self.step}.", *self.notes]
        )


@dataclass(frozen=True, slots=True)
class Held:
    """Ranks that answered `halt.hold`: those of the running cell, and how many steps each made.

    `paused` is the step after which all of them stand still already; None where they do not.
    """

    steps: Mapping[int, int]
    params: tuple[str, ...]
    paused: int | None

    @classmethod
    def of(cls, said: Mapping[int, Mapping[str, Any]]) -> "Held":
        """Return what ranks have answered.

        Raises:
            ClusterError: No cell runs, its steps are not counted, or some ranks alone are paused.
        """
        running = {rank: one for rank, one in said.items() if one["params"] is not None}
        if not running:
            raise ClusterError(
                "No cell runs on the ranks, so there is no step to wait for.",
                do="ask while a %%distributed cell trains: from a terminal, a board's button or "
                "another console; a cell of the notebook waits behind it.",
            )
        if any(one["step"] is None for one in running.values()):
            raise ClusterError(
                "Steps are not counted on these ranks.",
                why="they were started without hooks.",
                do="%dist start without --no-hooks",
            )
        steps = {rank: one["step"] for rank, one in running.items()}
        paused = {steps[rank] for rank, one in running.items() if one["paused"]}
        is_all = len(paused) == 1 and all(one["paused"] for one in running.values())
        if paused and not is_all:
            raise ClusterError(
                "Some of the ranks alone were paused, and cannot come to the others' step.",
                why="nothing was done, and all ranks go on.",
                do="ask again.",
            )
        params = tuple(next(iter(running.values()))["params"])
        return cls(steps, params, paused.pop() if is_all else None)

    @property
    def target(self) -> int:
        """The step after which all stand still: no rank is beyond it, and each can get there."""
        return self.paused if self.paused is not None else 1 + max(self.steps.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run the cell."""
        return tuple(sorted(self.steps))


def late(target: int, looked: Mapping[int, Mapping[str, Any]]) -> list[int] | None:
    """Return the ranks that do not stand after step `target` yet; None where one never will."""
    return None if over(looked) else [r for r, one in looked.items() if one["stands"] != target]


def over(looked: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the ranks whose cell has ended, that died, or that were not asked long enough."""
    return [rank for rank, one in looked.items() if not one["is_on"]]


def require_changes(values: Mapping[str, Any], params: tuple[str, ...] | None = None) -> None:
    """Check what is to be set, before a rank stands still for it.

    Args:
        values: By name.
        params: Names that the cell was given by `-p`; None where that is not known yet.

    Raises:
        UsageError: A name is none of these, or a value cannot be set.
    """
    if not values:
        raise UsageError("There is nothing to change.", do="%dist change lr=0.01")
    require_params(values)
    rate = values.get(LR, 0.0)
    if not (is_number(rate) and math.isfinite(rate) and rate >= 0):
        raise UsageError(f"lr is a number, 0 or more, not {rate!r}.")
    if params is None:
        return
    if unknown := [name for name in values if name != LR and name not in params]:
        known = ", ".join([LR, *(name for name in params if name != LR)])
        raise UsageError(
            f"{unknown[0]} cannot be changed while the cell runs.",
            why=f"known here: {known}. Others are the cell's -p parameters, and it has "
            f"{'no other' if params else 'none'}.",
            do=f"give the cell -p {unknown[0]}=VALUE, and read it in the loop.",
        )


class Halts:
    """What one session asks of the steps of the cell that runs."""

    def __init__(self, cluster: Cluster) -> None:
        """Begin with nothing asked."""
        self.cluster = cluster
        self.paused_at: int | None = None  # a step; ranks that then die or are interrupted go on
        self._requests = cluster.requests
        self._lock = threading.Lock()

    def cell_begins(self) -> None:
        """Forget the pause of a cell that was interrupted, or ended otherwise, in it."""
        self.paused_at = None

    def pause(self, timeout_s: float) -> Paused:
        """Let all ranks stand still; raises as `_standing`."""
        with self._standing(timeout_s, pause=True) as (held, _):
            paused = Paused(held.target, held.ranks)
        self.paused_at = paused.step
        return paused

    def resume(self) -> str:
        """Let all ranks go on; return from where.

        Raises:
            ClusterError: None stood still.
        """
        said = self._each(
            self.cluster.living(), lambda rank: self._requests.ask(rank, "halt.end", busy=True)
        )
        self.paused_at = None
        paused = {rank: step for rank, step in said.items() if step is not None}
        if not paused:
            raise ClusterError("No rank is paused.", do="%dist status shows what ranks do.")
        steps = " and ".join(map(str, sorted(set(paused.values()))))
        return f"Going on after step {steps} on {name_ranks(sorted(paused))}."

    def peek(self, expression: str, timeout_s: float) -> Peeked:
        """Evaluate an expression on all ranks; raises as `_standing`, and UsageError."""
        try:
            compile(expression := expression.strip(), "<peek>", "eval")
        except (SyntaxError, ValueError) as error:
            raise UsageError(
                f"{expression!r} is no expression: {error}.", do="%dist peek model.weight.norm()"
            ) from None
        with self._standing(timeout_s) as (held, key):
            said = self._act(held, key, "peek", expression=expression)
            values = {rank: one["text"] for rank, one in said.items() if "text" in one}
            errors = {rank: one["error"] for rank, one in said.items() if "error" in one}
            return Peeked(expression, held.target, values, errors)

    def change(self, values: Mapping[str, Any], timeout_s: float) -> Changed:
        """Set values on all ranks; raises as `_standing`, and UsageError."""
        require_changes(values)
        encoded = {name: plain.encode(value) for name, value in values.items()}
        with self._standing(timeout_s, lambda held: require_changes(values, held.params)) as (
            held,
            key,
        ):
            said = self._act(held, key, "change", values=encoded, params=held.params)
        if failed := {rank: one["error"] for rank, one in said.items() if "error" in one}:
            rank, error = next(iter(failed.items()))
            raise ClusterError(
                f"{begin_with_ranks(sorted(failed))} could not set {', '.join(values)}.",
                why=f"rank {rank}: {error}",
                do="interrupt the cell: ranks may differ now.",
            )
        first = said[min(said)]
        changes = tuple(Change(*one) for one in first["changes"])
        notes = tuple(
            f"{kind} computes lr anew at its next step, so it holds until then."
            for kind in first["overwritten_by"]
        )
        return Changed(held.target, held.ranks, changes, notes)

    def change_as_typed(self, word: str, timeout_s: float) -> Changed:
        """Set a value that is given as `lr=0.01`; raises as `change`."""
        name, _, value = word.partition("=")
        try:
            read = read_param(f"{name.strip()}={value.strip()}", "change")
        except ValueError as error:
            raise UsageError(f"{error}.", do="type one value, as lr=0.01.") from None
        return self.change(dict([read]), timeout_s)

    @contextmanager
    def _standing(
        self,
        timeout_s: float,
        check: Callable[[Held], None] = lambda _: None,
        *,
        pause: bool = False,
    ) -> Iterator[tuple[Held, str]]:
        """Have all ranks of the running cell stand after the same step, within the block.

        Where they were paused before, they stay so; others go on, or with `pause` stay, too.

        Raises:
            ClusterError: No cell runs, or the ranks do not all come there in time; then none has
                done anything, and all have gone on.
        """
        if not is_number(timeout_s) or timeout_s <= 0:
            raise UsageError(f"timeout_s is a number of seconds above 0, not {timeout_s!r}.")
        key = uuid.uuid4().hex
        with self._lock:
            asked = tuple(self.cluster.living())
            stay = False
            try:
                said = self._each(
                    asked, lambda rank: self._requests.ask(rank, "halt.hold", busy=True, key=key)
                )
                held = Held.of(said)
                stay = held.paused is not None
                if silent := [rank for rank in asked if rank not in said]:
                    raise _no_answer(silent)
                check(held)
                if not stay:
                    self._meet(held, key, timeout_s)
                yield held, key
                stay = stay or pause
            finally:
                stood = self._end(asked, key, pause=stay)
            if gone := [rank for rank in held.ranks if pause and stood.get(rank) != held.target]:
                self._end(asked, key)
                raise ClusterError(
                    f"{begin_with_ranks(gone)} did not stay after step {held.target}, so all go on."
                )

    def _end(self, ranks: Iterable[int], key: str, *, pause: bool = False) -> dict[int, Any]:
        """Let ranks go on, or stay; return after which step each stood."""
        return self._each(
            ranks,
            lambda rank: self._requests.ask(rank, "halt.end", busy=True, key=key, pause=pause),
        )

    def _meet(self, held: Held, key: str, timeout_s: float) -> None:
        """Wait until all ranks stand after the step that is due; raises as `_standing`."""
        ranks, target = held.ranks, held.target
        self._each(
            ranks,
            lambda rank: self._requests.ask(rank, "halt.go_on_to", busy=True, key=key, step=target),
        )
        deadline, pause_s = time.monotonic() + timeout_s, _LOOK_S
        while True:
            looked = self._look(ranks, key)
            left = late(target, looked)
            if left == []:
                return
            if left is None:
                raise ClusterError(
                    f"{begin_with_ranks(over(looked))} ended the cell before the end of step "
                    f"{target}, or went on, so nothing was done."
                )
            if time.monotonic() > deadline:
                raise self._too_late(left, looked, target, timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    def _too_late(
        self,
        left: list[int],
        looked: Mapping[int, Mapping[str, Any]],
        target: int,
        timeout_s: float,
    ) -> ClusterError:
        steps = sorted({looked[rank]["step"] for rank in left})
        made = f"the newest step there was {', '.join(map(str, steps))}"
        if steps == [0]:
            made = "no optimizer has stepped there in this cell"
        states = {line.rank: line.state for line in Status.ask(self.cluster, describe="").ranks}
        return ClusterError(
            f"{begin_with_ranks(left)} did not come to the end of step {target} within "
            f"{timeout_s:g} s, so nothing was done, and all ranks go on.",
            why=f"{made}; rank {left[0]}: {states.get(left[0], 'gone')}.",
            do="ask again with a longer time (timeout_s), or look: %dist stacks.",
        )

    def _act(self, held: Held, key: str, name: str, **arguments: Any) -> dict[int, Any]:
        """Have ranks that stand do something, and return what each answers.

        However long it takes: a rank that went on while others wait for it in a collective of
        theirs would meet them with its next one.
        """
        self._each(
            held.ranks,
            lambda rank: self._requests.ask(
                rank, "halt.act", busy=True, key=key, name=name, **arguments
            ),
        )
        pause_s = _LOOK_S
        while True:
            looked = self._look(held.ranks, key)
            found = {rank: one["answer"] for rank, one in looked.items() if one["answer"]}
            if len(found) == len(held.ranks):
                return found
            if gone := over(looked):
                raise ClusterError(
                    f"{begin_with_ranks(gone)} went on, or ended the cell, without an answer.",
                    why="it was interrupted or continued, or a rank failed; the cell says it.",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    def _look(self, ranks: tuple[int, ...], key: str) -> dict[int, Any]:
        """Return how far each rank is; of one that is too busy to answer nothing is concluded."""
        living = self.cluster.living()
        unknown = {
            rank: {"step": 0, "stands": None, "answer": None, "is_on": rank in living}
            for rank in ranks
        }
        return unknown | self._each(
            ranks, lambda rank: self._requests.ask(rank, "halt.look", busy=True, key=key)
        )

    def _each(self, ranks: Iterable[int], ask: Callable[[int], "Future[Any]"]) -> dict[int, Any]:
        """Ask these ranks, and return what they answer in time."""
        return answers({rank: ask(rank) for rank in ranks})


def _no_answer(ranks: list[int]) -> NBDistError:
    return ClusterError(
        f"{begin_with_ranks(ranks)} did not answer within {_ANSWER_S:.0f} s, so nothing was done, "
        "and all ranks go on.",
        do="%dist status shows what ranks do.",
    )
