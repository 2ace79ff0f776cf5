"""What one rank of a dry cell did, and what it asks the others."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from nbdist.engine.dry.place import place
from nbdist.engine.dry.unknown import packed, unpacked
from nbdist.study.dry import Branch, Call, Loop

Ask = Callable[[tuple[Any, ...], list[int], int, Any, bool], dict[int, Any] | None]


MOST_ALIKE = 2000  # decisions at one place, of which the last is the other


def whole(place: str) -> str:
    """Return the key of answers by which a loop makes all its turns."""
    return f"the whole loop at {place}"


class NeverComesError(BaseException):
    """What a rank waits for never comes."""


class RankLog:
    """The calls and branches of this rank.

    Args:
        rank: It.
        answers: By place, how its branches decide: "no", "first" (yes the first time) or "yes"; by
            `whole` of the place of a loop that none of its turns is left out.
        ask: Gives all ranks of a group what each has brought: `(key, members, rank, own, waits)`;
            None where that never comes.

    Attributes:
        is_on: Whether anything is noted, as it is not while earlier cells run.
        calls: In order.
        branches: In order.
        notes: What the answer says beside them.
        brought: What it gave its peers to read, but for numbers that are not known.
        asks_rank: It follows from more than the cell's code and ours which rank this is.
    """

    def __init__(self, rank: int, answers: Mapping[str, str], ask: Ask) -> None:
        self._rank, self._answers, self._ask = rank, answers, ask
        self._numbers: dict[str, int] = {}
        self._loops: dict[str, int] = {}
        self._decided: dict[str, int] = {}
        self.is_on = True
        self.calls: list[Call] = []
        self.branches: list[Branch] = []
        self.notes: set[str] = set()
        self.brought: list[bytes] = []
        self.asks_rank = False

    def call(
        self, kind: str, group: dist.ProcessGroup, *, is_equal: bool = False, **how: Any
    ) -> int:
        """Note a call; return the value of what it gives."""
        number = self._numbers[group.group_name] = self._numbers.get(group.group_name, 0) + 1
        ranks = tuple(dist.get_process_group_ranks(group))
        if self.is_on and (len(ranks) > 1 or "send" in kind or "recv" in kind):
            self.calls.append(Call(kind, place(), ranks, group.group_name, **how))
        own = () if is_equal else (self._rank,)
        return hash((kind, group.group_name, number, *own))

    def exchange(
        self, kind: str, group: dist.ProcessGroup, own: Any, *, waits: bool = True
    ) -> list[Any] | None:
        """Return what all ranks of a group bring to this call of theirs.

        Raises:
            NeverComesError: One never does.
        """
        name = group.group_name
        ranks = dist.get_process_group_ranks(group)
        key = (kind, name, self._numbers.get(name, 0))
        self.brought.append(packed(own, has_values=False))
        found = self._ask(key, ranks, self._rank, packed(own), waits)
        if found is None:
            if waits:
                raise NeverComesError
            return None
        return [unpacked(found[rank], self.decide) for rank in ranks]

    def decide(self, value: int) -> bool:
        """Return which way a branch goes that asks for a number."""
        at = place()
        how = self._answers.get(at, "no")
        self._decided[at] = count = self._decided.get(at, 0) + 1
        answer = how == "yes" or (how == "first" and count == 1)
        answer ^= count % MOST_ALIKE == 0  # else `while not found` has no end
        if self.is_on:
            self.branches.append(Branch(at, value, answer))
        return answer

    def begin_loop(self) -> Loop:
        """Return a new loop's place and number."""
        at = place()
        self._loops[at] = self._loops.get(at, 0) + 1
        return at, self._loops[at]

    def runs_whole(self, loop: Loop) -> bool:
        """Return whether all turns of a loop are made."""
        return whole(loop[0]) in self._answers

    def turn(self, loop: Loop, number: int, of: int) -> None:
        """Note that a batch begins, or with 0 that the loop is over."""
        if self.is_on:
            self.calls.append(Call("turn", loop[0], loop=loop, turn=number, of=of))
