"""The order of a script against that of the notebook's runs. Pure.

A `%%distributed` cell stands where it succeeded first, as it succeeded last, and in the notebook
something may have come between. Blocks know their runs by their numbers, which only grow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nbdist.client.export import names as names_of
from nbdist.client.export.blocks import Block
from nbdist.formatting import counted


def without_repeats(blocks: Sequence[Block], keys: Mapping[int, str]) -> list[Block]:
    """Return the blocks; what a cell has sent again stands once where nothing tells the two apart.

    That is where all that took the first has run again since, as when a cell is corrected and all
    below it run anew: it stands where it was sent first, above what takes it, as it was sent last.
    Two cells may send one name: of each it is asked as if all others that can stand once do.

    Args:
        blocks: In the script's order, those of the notebook's own cells in that of their runs.
        keys: What is the same in all runs of a cell, by the numbers of runs; "" is of none.
    """
    reads = _reads(blocks, with_makers=True)
    before = _runs_before(blocks, keys)
    while True:
        stands_at: dict[int, int] = {}  # the place of each block in the script
        newest: dict[int, Block] = {}
        for n, block in enumerate(blocks):
            stands_at[n] = stands_at[before[n]] if n in before else n
            newest[stands_at[n]] = block
        apart = [
            n
            for n, first in before.items()
            if _are_apart(blocks[first], blocks[n], stands_at[n], newest, keys, reads)
        ]
        if not apart:
            return [newest[place] for place in sorted(newest)]
        for n in apart:
            del before[n]


def _runs_before(blocks: Sequence[Block], keys: Mapping[int, str]) -> dict[int, int]:
    """Return by its place what a cell has sent again, with the place of the run before.

    A cell may send a name twice in a run: the second is the one again that was the second before.
    """
    found: dict[int, int] = {}
    for n, block in enumerate(blocks):
        key = keys.get(block.number, "")
        earlier = [
            m
            for m in range(n)
            if key and keys.get(blocks[m].number) == key and _says_again(block, blocks[m])
        ]
        if not earlier:
            continue
        run = [m for m in earlier if blocks[m].number == blocks[earlier[-1]].number]
        nth = sum(
            one.number == block.number and _says_again(one, blocks[run[0]]) for one in blocks[:n]
        )
        if nth < len(run):
            found[n] = run[nth]
    return found


def _are_apart(
    first: Block,
    last: Block,
    place: int,
    others: Mapping[int, Block],
    keys: Mapping[int, str],
    reads: Mapping[str, set[str]],
) -> bool:
    """Return whether what one cell has sent twice cannot stand once, at `place`.

    It cannot where a block ran between the two that takes it or gives it anew. One above `place`
    that gives it was itself sent again; what it gave is what those took that ran after it.
    """
    given = {last.pushes} if last.pushes else last.binds
    between = {
        at: one
        for at, one in sorted(others.items())
        if first.number < one.number < last.number and keys.get(one.number) != keys.get(last.number)
    }
    giving = [one.number for at, one in between.items() if at < place and one.binds & given]
    for at, one in between.items():
        takes = bool(one.code) and not one.pushes and bool(_all_needs(one, reads) & given)
        if at < place:
            if takes and not any(number < one.number for number in giving):
                return True
        elif takes or one.binds & given:
            return True
    return False


def _says_again(block: Block, earlier: Block) -> bool:
    """Return whether a block of the same cell gives all that an earlier one gave."""
    if block.number == earlier.number or block.is_notebooks or earlier.is_notebooks:
        return False
    if block.pushes or earlier.pushes:
        return block.pushes == earlier.pushes and _condition(block) in ("", _condition(earlier))
    return not (block.code or earlier.code) and block == replace(earlier, number=block.number)


def _condition(block: Block) -> str:
    """Return `if rank == 1:` of what was sent to some ranks."""
    head = block.code.partition("\n")[0]
    return head if head.startswith("if ") else ""


def ran_later(blocks: Sequence[Block]) -> list[str]:
    """Return in sentences which cells stand above what gave them a name when they ran last."""
    kept = [block for block in blocks if block.code]
    reads = _reads(kept)
    said = []
    for place, block in enumerate(kept):
        below = [one for one in kept[place + 1 :] if one.number < block.number]
        needs = _all_needs(block, reads) if below else set()
        for other in below:
            for name in sorted(needs & _gives_anew(other)):
                said.append(
                    f"Cell {block.number} ran last after cell {other.number} had set {name}: it"
                    f" stands above cell {other.number}, where it succeeded first."
                )
    return said


def _reads(blocks: Sequence[Block], *, with_makers: bool = False) -> dict[str, set[str]]:
    """Return for each name that blocks give what it looks up; and that of which it was made."""
    reads: dict[str, set[str]] = {}
    for block in blocks:
        for name, stands_on in names_of.standing(block.code).items():
            reads.setdefault(name, set()).update(stands_on.looks_up)
            reads[name].update(stands_on.made_with if with_makers else ())
    return reads


def _all_needs(block: Block, reads: Mapping[str, set[str]]) -> set[str]:
    """Return the names that a block takes, also in functions that it calls."""
    waiting = list(block.needs)
    for name in waiting:
        waiting += reads.get(name, set()) - set(waiting)
    return set(waiting)


def _gives_anew(block: Block) -> set[str]:
    """Return what a block gives; an import of the same again changes nothing."""
    return {
        name
        for name, texts in names_of.bindings(block.code).items()
        if not all(text.startswith(names_of.IMPORTED) for text in texts)
    }


def ranks_at_the_end(
    blocks: Sequence[Block],
    start: int | None,
    changes: Sequence[tuple[int, int | None]],
) -> tuple[int | None, list[str]]:
    """Return on how many ranks the last of a script's cells ran, and which ran on others.

    It is more where a cell before was for a rank that there was then.

    Args:
        blocks: The script's.
        start: How many ranks there were at first; None where that is not known.
        changes: Numbers of cells that changed it, and to how many; None is a start.

    Returns:
        None where nothing but a start has made them; and sentences.
    """
    ran = sorted({block.number for block in blocks if block.code and not block.pushes})
    changes = [one for one in sorted(changes, key=lambda one: one[0]) if ran and one[0] < ran[-1]]
    if not changes or changes[-1][1] is None:
        return None, []
    n = max(changes[-1][1], *(block.least_ranks for block in blocks if block.code))
    said = []
    for number in ran:
        before = [None, *(of for at, of in changes if at < number)][-1] or start
        if before != n:
            on = counted(before, "rank") if before else "the ranks that %dist start chose"
            said.append(f"Cell {number} ran on {on}, and in the script on {n}.")
    return n, said
