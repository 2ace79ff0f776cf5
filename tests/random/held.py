"""What every rank holds, and what it should: names, the models they mean, and where these stand.

A name means a `Shadow` on each rank, or nothing. Newcomers get what a living rank holds, whole or
not at all, and what they do not get is told.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tests.random.acts import Model
from tests.random.calls import Calls
from tests.random.shadow import Shadow, State, is_at, named

# Trouble of a model, beside what has become of its ranks.
REFUSED = "refused"
OPTIMIZER_REFUSED = "its optimizer was refused"


class Held:
    """What all ranks hold, as far as a trial looks at it."""

    def __init__(self, calls: Calls) -> None:
        """Begin with ranks that hold nothing."""
        self.names: dict[str, dict[int, Shadow | None]] = {}  # name -> rank -> what it means
        self.unsure: set[str] = set()  # names whose meaning a failed cell leaves open
        self.variables: dict[str, dict[int, set[Any]]] = {}
        self.allowed: dict[int, list[State]] = {}  # id of a shadow -> where it may stand now
        self._void: set[tuple[str, int]] = set()  # names of which a rank holds what is of no use
        self._seen: dict[int, str] = {}  # id of a shadow -> what its ranks held last
        self._calls = calls

    def bind(self, name: str, by_rank: Mapping[int, Shadow | None]) -> None:
        """Note that all ranks have just bound a name, or have it no more."""
        self.names[name] = dict(by_rank)
        self.unsure.discard(name)
        self._void = {(other, rank) for other, rank in self._void if other != name}

    def unbind(self, name: str, ranks: Iterable[int]) -> None:
        """Note that ranks have deleted a name."""
        for rank in ranks:
            self.names[name][rank] = None
            self._void.discard((name, rank))

    def forget(self, models: Iterable[Model]) -> None:
        """Compare the names of models no more, until they are bound again."""
        self.unsure |= {model.name for model in models}

    def leave(self, ranks: Collection[int]) -> None:
        """Note that there are no such ranks any more."""
        tables: list[dict[int, Any]] = [*self.names.values(), *self.variables.values()]
        for by_rank in tables:
            for rank in [rank for rank in by_rank if rank in ranks]:
                del by_rank[rank]

    def usable(self, name: str) -> Shadow | None:
        """Return the model of a name that all who train it hold, and that is in no trouble."""
        shadow = self.common(name)
        # Under other names it has no optimizer or data of its own.
        is_own = shadow is not None and name == shadow.model.name
        return shadow if shadow is not None and is_own and not shadow.trouble else None

    def common(self, name: str) -> Shadow | None:
        """Return the model that a name means on all ranks that train it."""
        by_rank = self.names.get(name, {})
        shadows = {id(s): s for s in by_rank.values() if s is not None}
        if name in self.unsure or len(shadows) != 1:
            return None
        shadow = next(iter(shadows.values()))
        return shadow if all(by_rank.get(rank) is shadow for rank in shadow.members) else None

    def compare(self, held: Mapping[int, Mapping[str, Any]], replacements: Collection[int]) -> None:
        """Hold what ranks were seen to hold (see `on_rank.look`) against what they should."""
        living = [rank for rank in held if rank not in replacements]
        self._lose(set(replacements))
        names = [name for name in self.names if name not in self.unsure]
        for name in names:
            self._compare(name, {rank: held[rank][name] for rank in held}, living)
        self._settle(names, held)
        for name, allowed in self.variables.items():
            self._compare_variable(name, allowed, held, living)
        if not living:
            self.variables.clear()

    def _compare_variable(
        self,
        name: str,
        allowed: dict[int, set[Any]],
        held: Mapping[int, Mapping[str, Any]],
        living: Sequence[int],
    ) -> None:
        of_living = {value for rank in living for value in allowed[rank]} or {"absent"}
        for rank, values in held.items():
            right = allowed[rank] if rank in living else of_living
            if values[name] not in right:
                what = f"{name} of rank {rank} is {values[name]}, not of {right}"
                self._calls.find("a wrong value", what)
            allowed[rank] = {values[name]}

    def _lose(self, replacements: set[int]) -> None:
        """Note what went with ranks that were replaced."""
        for shadow in self.shadows():
            gone = replacements & set(shadow.members)
            if gone and (shadow.is_sharded or shadow.is_split):
                shadow.trouble = shadow.trouble or "a rank that held a part of it died"
            elif gone and gone >= set(shadow.members):
                shadow.trouble = "all its ranks died"

    def _compare(self, name: str, held: Mapping[int, Any], living: Sequence[int]) -> None:
        """Check that living ranks have kept what a name means, and see what replacements have."""
        by_rank = self.names[name]
        for rank in living:
            if (name, rank) in self._void:
                continue
            # What a replacement could not be given is a placeholder also where it had no such name.
            if by_rank.get(rank) is None and not isinstance(held[rank], str):
                self._calls.find("a wrong value", f"{name} was not on rank {rank}, and is now")
            if by_rank.get(rank) is not None and isinstance(held[rank], str):
                self._calls.find("a lost variable", f"{name} of rank {rank} is {held[rank]}")
                by_rank[rank] = None
        meant = {id(s): s for r in living if (s := by_rank.get(r)) is not None}
        for rank in sorted(set(held) - set(living)):
            had, by_rank[rank] = by_rank.get(rank), None
            if held[rank] != "absent":
                self._void.add((name, rank))
            if not isinstance(held[rank], str):
                fits = [s for s in meant.values() if self._fits(s, held[rank])]
                by_rank[rank] = fits[0] if fits else None
                if fits:
                    self._void.discard((name, rank))
                is_part = any(s.is_sharded for s in meant.values())
                if not fits and not is_part and not self._is_torn_now(meant.values()):
                    other = self._whose(held[rank])
                    what = f"{name} of the new rank {rank} is no living rank's {name}{other}"
                    self._calls.find("a wrong model", what)
                continue
            for shadow in meant.values():
                is_whole = not (shadow.is_sharded or shadow.is_split or shadow.trouble)
                if is_whole and had is shadow and not self.is_named(rank, name):
                    what = f"{name} of the new rank {rank} is {held[rank]}, and nothing says so"
                    self._calls.find("silently lost", what)

    def _is_torn_now(self, shadows: Iterable[Shadow]) -> bool:
        return any((s.is_split and id(s) in self.allowed) or s.is_torn for s in shadows)

    def is_named(self, rank: int, name: str) -> bool:
        """Return whether it was told that a new rank is without a name."""
        told = re.findall(
            rf"(?:Not cloned to rank {rank}|Rank {rank} (?:is without|has no)|Ranks [^.]*without"
            rf"|The \w+ of [^.]* that ranks? [^.]*{rank}[^.]* held)[^\n]*",
            self._calls.text,
        )
        return any(re.search(rf"\b{name}\b", line) for line in told)

    def _fits(self, shadow: Shadow, seen: Mapping[str, Any]) -> bool:
        states = self.allowed.get(id(shadow)) or [shadow.state()]
        return any(is_at(state, seen) for state in states)

    def _settle(self, names: Sequence[str], held: Mapping[int, Mapping[str, Any]]) -> None:
        """Find where each shadow stands now: one state for all ranks that hold it."""
        for shadow in self.shadows():
            seen = {
                (name, rank): held[rank][name]
                for name in names
                for rank, meant in self.names[name].items()
                if meant is shadow and rank in held and not isinstance(held[rank][name], str)
            }
            if not seen:
                continue
            if shadow.is_torn or (shadow.trouble and shadow.is_sharded):
                continue
            allowed = self.allowed.get(id(shadow), [shadow.state()])
            state = next((s for s in allowed if all(is_at(s, v) for v in seen.values())), None)
            texts = {json.dumps(value) for value in seen.values()}
            if state is None:
                if "in the middle of an optimizer step" in self._calls.text:
                    self.unsure.add(shadow.model.name)
                    continue
                is_told = shadow.trouble or "no snapshot is common" in self._calls.text
                is_in_parts = shadow.is_split or shadow.is_sharded
                if is_in_parts and is_told and id(shadow) in self.allowed:
                    # Ended within its step, of which each rank makes a part: it must be refused.
                    shadow.trouble = shadow.trouble or "its parts do not fit together"
                    shadow.is_torn = True
                    continue
                self._calls.find("wrong weights", self._describe(shadow, allowed, seen))
                self.unsure |= {name for name, _ in seen}
                continue
            if not shadow.is_sharded and len(texts) > 1:
                self._calls.find("replicas differ in bits", f"{shadow.model.name}: {sorted(seen)}")
            if id(shadow) not in self.allowed and not shadow.is_sharded:
                before = self._seen.get(id(shadow))
                if before is not None and before not in texts:
                    self._calls.find(
                        "changed though untouched", f"{shadow.model.name}: {sorted(seen)}"
                    )
            self._seen[id(shadow)] = min(texts)
            if state.made != shadow.made or id(shadow) in self.allowed:
                shadow.put(state)

    def shadows(self) -> list[Shadow]:
        """Return the models that names mean, but those left open."""
        found = {
            id(s): s
            for name, by_rank in self.names.items()
            if name not in self.unsure
            for s in by_rank.values()
            if s is not None
        }
        return list(found.values())

    def _describe(
        self, shadow: Shadow, allowed: Sequence[State], seen: Mapping[tuple[str, int], Any]
    ) -> str:
        lines = [f"{shadow.model.name} should be at step {[s.made for s in allowed]}:"]
        for (name, rank), value in seen.items():
            at = [s.made for s in allowed if is_at(s, value)]
            where = f"at step {at[0]}" if at else f"something else{self._whose(value)}"
            lines.append(f"{name} of rank {rank} is {where}")
        return " ".join(lines)

    def _whose(self, value: Mapping[str, Any]) -> str:
        states = {s.model.name: s for s in self.shadows()}
        whose = named(states, value)
        return f" ({whose})" if whose else ""
