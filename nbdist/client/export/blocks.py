"""Blocks: what cells come to in a script, and which of them hold together. Pure."""

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from nbdist.client.export import names as names_of
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
        sets: What it sets beside names, such as `torch.manual_seed`, or that it may draw; see
            `settings_in`.
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
    return _leave_out_users(_leave_out_outlived(_leave_out_clashes(blocks)))


def _leave_out_clashes(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks, without pushes that stand on a name which is another one on the ranks.

    In the notebook a function that was sent keeps its own globals. A script has one of each name.
    """
    found = list(blocks)
    bindings = [names_of.bindings(block.code) for block in blocks]
    for place, block in enumerate(blocks):
        mine = bindings[place] if block.pushes and block.code else {}
        for name in sorted(mine.keys() - {block.pushes}):
            others = [bindings[n].get(name, set()) for n in _ranks_own(blocks, place, name)]
            is_import = all(text.startswith(names_of.IMPORTED) for text in mine[name])
            is_ranks = name in NAMES_OF_A_RANK and not is_import
            if is_ranks or set().union(*others) - mine[name]:
                whose = f"uses the notebook's {name}: the ranks have another"
                reason = f"pushes {block.pushes}, which {whose}"
                found[place] = replace(block, code="", reason=reason)
                break
    return found


def _ranks_own(blocks: Sequence[Block], push: int, name: str) -> list[int]:
    """Return the places of what gives ranks a name of their own, which a push would give anew.

    What else than the name that was sent a push brings is not the ranks': only what was sent has
    it. A push of the name itself counts until the next, and where cells take the name.
    """
    cells = [n for n, block in enumerate(blocks) if block.code and not block.pushes]
    found = [n for n in cells if n != push]
    sent = [n for n, block in enumerate(blocks) if block.pushes == name and n != push]
    following = next((n for n in sent if n > push), len(blocks))
    if not any(push < n < following for n in cells):
        return found
    if any(name in blocks[n].needs for n in cells):
        for n in reversed([n for n in sent if n < push]):
            found.append(n)
            if not blocks[n].code.startswith("if "):
                break
    return found


def _leave_out_outlived(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks, without pushes that would see what a later push brings, and are used then.

    One after the other is right where a function and what it uses are both sent anew.
    """
    found = list(blocks)
    bindings = [names_of.bindings(block.code) for block in blocks]
    sources = _Sources(found)
    for place in reversed(range(len(found))):  # a push that is left out brings nothing
        block = found[place]
        mine = bindings[place] if block.pushes and block.code else {}
        for later in range(place + 1, len(found)):
            one = found[later]
            brings = bindings[later] if one.pushes and one.code else {}
            other = [
                name
                for name in sorted(mine.keys() & brings.keys() - {block.pushes})
                if brings[name] - mine[name]
            ]
            if other and _is_used_after(found, sources, place, later):
                whose = f"its {other[0]} is another one in cell {one.number}'s push"
                reason = f"pushes {block.pushes}, and {whose}"
                found[place] = replace(block, code="", reason=reason)
                break
    return found


def _is_used_after(blocks: Sequence[Block], sources: "_Sources", push: int, later: int) -> bool:
    """Return whether a cell after `later` takes what a push gave, or what was made of it before."""
    name = blocks[push].pushes
    held = _holding(blocks[push], blocks[push + 1 : later])
    for place in range(later + 1, len(blocks)):
        if blocks[place].pushes or not blocks[place].code:
            continue
        for one in sources.used(place).keys() & held:
            givers = sources.givers(place, one)
            is_sent_anew = blocks[later].pushes == name  # on whichever ranks, with what it brings
            if one == name and push in givers and not is_sent_anew:
                return True
            if one != name and any(giver < later for giver in givers):
                return True
    return False


def _holding(push: Block, between: Sequence[Block]) -> set[str]:
    """Return the names that may hold what a push gave: it, its objects, and what took these.

    What a function returns does not hold it, and what a class returns does.
    """
    body = ast.parse(push.code).body
    classes = {node.name for top in body for node in ast.walk(top) if _is_class(node)}
    held = {push.pushes}
    for block in between:
        for statement in ast.parse(block.code).body if not block.pushes else ():
            called = {id(n.func) for n in ast.walk(statement) if isinstance(n, ast.Call)}
            taken = {
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and (id(node) not in called or node.id in classes)
            }
            text = ast.unparse(statement)
            if held & taken & names_of.needed_at_once(text):
                held |= names_of.standing(text).keys()
    return held


def _is_class(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


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
        self._standing = [names_of.standing(block.code) for block in blocks]
        self._taken = [names_of.taken(block.code) for block in blocks]

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
        nothing = frozenset[str]()
        waiting = [(name, self._taken[place].get(name, nothing)) for name in ways]
        for name, bound in waiting:  # by the block itself, when it takes the name
            inside: set[str] = set()
            for of in self.givers(place, name):
                inside |= self._looked_up(of, name, set())
            for one in sorted(inside - ways.keys() - bound):
                ways[one] = f"{ways[name]}, which reads {one}"
                waiting.append((one, bound))
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
    found = {block.number: sorted(names_of.needed(block.code) - given) for block in kept}
    return {number: names for number, names in found.items() if names}


def ranks_needed(blocks: Sequence[Block]) -> tuple[int, str]:
    """Return how many ranks the blocks need at least, and which cell says so."""
    block = max(blocks, key=lambda one: one.least_ranks if one.code else 1, default=None)
    if block is None or not block.code or block.least_ranks == 1:
        return 1, ""
    return block.least_ranks, f"cell {block.number} runs on {name_ranks([block.least_ranks - 1])}"
