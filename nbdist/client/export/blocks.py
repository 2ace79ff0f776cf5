"""Blocks: what cells come to in a script, and which of them hold together. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nbdist.client.export import code as code_of
from nbdist.ranks import NAMES_OF_A_RANK, name_ranks


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
        without: Lines of IPython's that the code does without.
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
    without: tuple[str, ...] = ()
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
            is_ranks = name in NAMES_OF_A_RANK and mine[name] != {code_of.IMPORTED}
            if is_ranks or set().union(*others) - mine[name]:
                whose = f"uses the notebook's {name}: the ranks have another"
                reason = f"pushes {block.pushes}, which {whose}"
                found[place] = replace(block, code="", reason=reason)
                break
    return found


def _leave_out_users(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks, without those that need what only a block that is left out gives."""
    blocks = list(blocks)
    while True:
        there = {name for block in blocks if block.code for name in block.binds}
        gone = {
            name: block
            for block in reversed(blocks)
            if not block.code and not block.is_notebooks
            for name in block.binds
        }
        for place, block in enumerate(blocks):
            lacking = sorted((block.needs & gone.keys()) - there) if block.code else []
            if lacking:
                of = gone[lacking[0]]
                reason = f"uses {lacking[0]}, which cell {of.number} would have given"
                blocks[place] = replace(block, code="", reason=reason)
                break
        else:
            return blocks


def ranks_needed(blocks: Sequence[Block]) -> tuple[int, str]:
    """Return how many ranks the blocks need at least, and which cell says so."""
    block = max(blocks, key=lambda one: one.least_ranks if one.code else 1, default=None)
    if block is None or not block.code or block.least_ranks == 1:
        return 1, ""
    return block.least_ranks, f"cell {block.number} runs on {name_ranks([block.least_ranks - 1])}"
