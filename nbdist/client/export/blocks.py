"""Blocks: what cells come to in a script, and which of them hold together. Pure."""

import builtins
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nbdist.client.export import code as code_of
from nbdist.client.export.flow import flow_of
from nbdist.ranks import NAMES_OF_A_RANK, name_ranks

_PYTHONS = {*vars(builtins), "__annotations__", "__builtins__", "__file__", "__name__", "this_rank"}


@dataclass(frozen=True, slots=True)
class Block:
    """A cell in the script: its number, a heading, and code; or why it is left out.

    Attributes:
        number: The cell's.
        heading: What it was, in a line.
        code: Plain Python.
        reason: Why there is none, in words that follow `cell 5: it`.
        binds: The names that it gives or would have given.
        needs: The names that it takes.
        least_ranks: How many ranks it needs at least.
        is_notebooks: It is the notebook's own, and was not asked for.
        has_failed: It is left out for that.
        without: Lines of IPython's, and what draws, that the code does without.
        runs: How often the cell has succeeded in the notebook.
        failures: How often it has failed before that.
        sets: What it sets beside names, such as `torch.manual_seed`; see `settings_in`.
        pushes: The name that `%dist push` has sent; others that the code binds are the notebook's.
    """

    number: int
    heading: str
    code: str = ""
    reason: str = ""
    binds: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    least_ranks: int = 1
    is_notebooks: bool = False
    has_failed: bool = False
    without: tuple[str, ...] = ()
    runs: int = 1
    failures: int = 0
    sets: tuple[str, ...] = ()
    pushes: str = ""


def consistent(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks, those left out that cannot run, or mean the same, without the notebook."""
    return _leave_out_users(_leave_out_clashes(blocks))


def _leave_out_clashes(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks, without pushes that stand on a name which is another one on the ranks.

    In the notebook a function that was sent keeps its own globals. A script has one of each name.
    """
    found = list(blocks)
    bindings = [code_of.bindings(block.code) for block in blocks]
    for place, block in enumerate(blocks):
        mine = bindings[place] if block.pushes and block.code else {}
        for name in sorted(mine.keys() - {block.pushes}):
            others = [other.get(name, set()) for n, other in enumerate(bindings) if n != place]
            is_import = all(text.startswith(code_of.IMPORTED) for text in mine[name])
            is_ranks = name in NAMES_OF_A_RANK and not is_import
            if is_ranks or set().union(*others) - mine[name]:
                whose = f"uses the notebook's {name}: the ranks have another"
                reason = f"pushes {block.pushes}, which {whose}"
                found[place] = replace(block, code="", reason=reason)
                break
    return found


def _leave_out_users(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks, without those that need what only a block that is left out gives."""
    blocks = list(blocks)
    sources = _Sources(blocks)
    while True:
        for place, block in enumerate(blocks):
            reason = sources.what_lacks(place) if block.code else ""
            if reason:
                blocks[place] = replace(block, code="", reason=reason)
                break
        else:
            return blocks


def doubtful(blocks: Sequence[Block]) -> list[str]:
    """Return in sentences which values of a script may not be those of the notebook."""
    sources = _Sources(blocks)
    said = []
    for place, block in enumerate(blocks):
        for name in sorted(sources.used(place)) if block.code else ():
            of = next(iter(sources.givers(place, name)), None)
            since = () if of is None else blocks[of + 1 : place]
            failed = [b.number for b in since if b.has_failed and name in b.binds]
            if of is not None and failed:
                said.append(
                    f"Cell {block.number} uses {name} as cell {blocks[of].number} gave it; "
                    f"cell {failed[-1]}, which has failed, may have set it anew."
                )
    failed_first = sorted({block.number for block in blocks if block.code and block.failures})
    said += [
        f"Cell {number} failed before it succeeded: what it had changed by then is not in the"
        " script."
        for number in failed_first
    ]
    return said


class _Sources:
    """From which blocks a block has its names. `blocks` may be left out meanwhile, none moves."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._flows = [flow_of(block.code) for block in blocks]
        self._standing = [code_of.standing(block.code) for block in blocks]

    def what_lacks(self, place: int) -> str:
        """Return that a block lacks a name, itself or in what it uses; "" where it lacks none."""
        for name, way in self.used(place).items():
            lacking = [of for of in self.givers(place, name) if not self._blocks[of].code]
            if lacking:
                number = self._blocks[lacking[0]].number
                return f"{way}, which cell {number} would have given"
        return ""

    def used(self, place: int) -> dict[str, str]:
        """Return the names that a block takes, and those that what it uses looks up, with how.

        A function looks them up when it is called, and so may what was made with functions and
        classes: a model calls what its class's methods name.
        """
        ways = {name: f"uses {name}" for name in sorted(self._blocks[place].needs)}
        waiting = list(ways)
        for name in waiting:
            inside: set[str] = set()
            for of in self.givers(place, name):
                inside |= self._looked_up(of, name, set())
            for one in sorted(inside - ways.keys() - self._flows[place].binds):
                ways[one] = f"{ways[name]}, which reads {one}"
                waiting.append(one)
        return ways

    def givers(self, place: int, name: str) -> list[int]:
        """Return the places of the blocks that may give a name to the one at `place`.

        The newest comes first; an older one counts where it is not sure that a newer one did. Else
        one after it, as for a function that was defined too late. A cell that has failed may have
        got as far or not: it counts where there is no other.
        """
        blocks = self._blocks
        giving = [n for n, b in enumerate(blocks) if name in b.binds and not b.is_notebooks]
        kept = [n for n in giving if not blocks[n].has_failed] or giving
        found: list[int] = []
        for n in reversed([n for n in kept if n < place]):
            found.append(n)
            if not blocks[n].code or name in self._flows[n].binds:
                break
        if found or name in NAMES_OF_A_RANK:  # of those a script has its own, from its beginning
            return found
        after = [n for n in kept if n > place]
        return [n for n in after if blocks[n].code][:1] or after[:1]

    def _looked_up(self, of: int, name: str, seen: set[tuple[int, str]]) -> set[str]:
        """Return the names that a value looks up when it is used, which the block at `of` gives."""
        if (of, name) in seen or not self._blocks[of].code:
            return set()
        seen.add((of, name))
        own = self._standing[of].get(name)
        if own is None:
            return set()
        found = set(own.looks_up)
        for one in own.made_with:
            if one in self._standing[of]:
                found |= self._looked_up(of, one, seen)
            if one not in self._flows[of].binds:
                for before in self.givers(of, one):
                    found |= self._looked_up(before, one, seen)
        return found


def not_given(blocks: Sequence[Block]) -> dict[int, list[str]]:
    """Return names that a script's cells take and that nothing in it gives, by the cells' numbers.

    A star import may give any name, and none is told then.
    """
    kept = [block for block in blocks if block.code]
    if any("import *" in block.code for block in kept):
        return {}
    given = {name for block in kept for name in block.binds} | NAMES_OF_A_RANK | _PYTHONS
    found = {block.number: sorted(block.needs - given) for block in kept}
    return {number: names for number, names in found.items() if names}


def ranks_needed(blocks: Sequence[Block]) -> tuple[int, str]:
    """Return how many ranks the blocks need at least, and which cell says so."""
    block = max(blocks, key=lambda one: one.least_ranks if one.code else 1, default=None)
    if block is None or not block.code or block.least_ranks == 1:
        return 1, ""
    return block.least_ranks, f"cell {block.number} runs on {name_ranks([block.least_ranks - 1])}"
