"""Hear one cell's records, and say what goes wrong in its training: each thing once.

Threads: `receive` runs on ipyparallel's IO thread, `lines` on the main one.
"""

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from nbdist.client.metrics.checks.rule import Memory, Rule, WatchedCell, Watcher
from nbdist.client.metrics.checks.rules import all_rules
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.shared.wire import Record

_log = logging.getLogger("nbdist.checks")

_Asked = tuple[Watcher[Any], list[Rule[Any]]]


class Mistake(NamedTuple):
    """What a rule has found."""

    rule: str
    sentence: str


class CellChecks:
    """What one cell's ranks have reported, and what follows from it.

    `spent_s` is the processor time of all rules so far.
    """

    def __init__(
        self,
        info: CellInfo,
        states: Mapping[str, str] | None = None,
        ignored: Collection[str] = (),
        of_session: Memory | None = None,
        of_kernel: Memory | None = None,
    ) -> None:
        """Begin with nothing known.

        Args:
            info: The cell.
            states: Of rules, by name; those without one are off. None has all warn.
            ignored: Rules of which this cell hears nothing. They watch on, for the next cell's.
            of_session: What earlier cells of the session have left; of this one likewise.
            of_kernel: The same of all sessions.
        """
        cell = WatchedCell(
            info.ranks, info.study is not None, of_session or Memory(), of_kernel or Memory()
        )
        everywhere = {rule.name: "warn" for rule in all_rules()}
        self.states = everywhere if states is None else states
        self.ignored = frozenset(ignored)
        self.failed: frozenset[str] = frozenset()  # rules that have an error of their own
        self.spent_s = 0.0
        self._watchers = self._watchers_of(cell)
        self._found: dict[str, str] = {}  # by rule; the first time counts
        self._said = 0
        self._is_over = False

    @property
    def found(self) -> tuple[str, ...]:
        """All that was found so far, the oldest first."""
        return tuple(self._found.values())

    @property
    def by_rule(self) -> dict[str, str]:
        """The same, by the name of the rule."""
        return dict(self._found)

    @property
    def mistake(self) -> Mistake | None:
        """The first finding of a rule that is to end the cell."""
        found = (Mistake(*one) for one in self.by_rule.items())
        return next((one for one in found if self.states[one.rule] == "raise"), None)

    def receive(self, records: list[Record]) -> None:
        """Take in what ranks tell."""
        began_s = time.thread_time()
        # Nearly all of them are steps in which nothing is found. A watcher takes them all at once:
        # in turns they would push each other's code out of the processor's caches.
        kinds = {record.kind for record in records}
        for watcher, rules in self._watchers:
            if watcher.kinds & kinds:
                self._take(watcher, rules, records, is_whole=watcher.kinds >= kinds)
        self.spent_s += time.thread_time() - began_s

    def _take(
        self,
        watcher: Watcher[Any],
        rules: list[Rule[Any]],
        records: list[Record],
        *,
        is_whole: bool,
    ) -> None:
        take, kinds = watcher.take, watcher.kinds
        try:
            for record in records if is_whole else [one for one in records if one.kind in kinds]:
                value = take(record)
                if value is not None:
                    self._decide(rules, value)
        except Exception:
            self._give_up(watcher, rules)

    def end(self) -> None:
        """Decide on what is left: no more records will come. A second call does nothing."""
        if not self._is_over:
            self._is_over = True
            for watcher, rules in self._watchers:
                try:
                    value = watcher.end()
                    if value is not None:
                        self._decide(rules, value)
                except Exception:
                    self._give_up(watcher, rules)

    def lines(self, *, is_last: bool = False) -> list[str]:
        """Return what was found since the last call; with `is_last`, no more records will come."""
        if is_last:
            self.end()
        new = list(self.found)[self._said :]
        self._said += len(new)
        return new

    def _decide(self, rules: list[Rule[Any]], value: Any) -> None:
        for rule in rules:
            if rule.name not in self._found and (sentence := rule.decide(value)):
                self._found[rule.name] = sentence

    def _give_up(self, watcher: Watcher[Any], rules: list[Rule[Any]]) -> None:
        """Ask rules no more of which one has failed: the others watch on."""
        _log.exception("Rules failed: %s", ", ".join(rule.name for rule in rules))
        self.failed |= {rule.name for rule in rules}
        self._watchers = [one for one in self._watchers if one[0] is not watcher]

    def _watchers_of(self, cell: WatchedCell) -> list[_Asked]:
        """Return one watcher for all rules that read the same, and the rules that may speak."""
        by_watcher: dict[type[Watcher[Any]], list[Rule[Any]]] = {}
        for rule in all_rules():
            if self.states.get(rule.name, "off") != "off":
                speaking = by_watcher.setdefault(rule.watcher, [])
                if rule.name not in self.ignored:
                    speaking.append(rule)
        return [(make(cell), speaking) for make, speaking in by_watcher.items()]
