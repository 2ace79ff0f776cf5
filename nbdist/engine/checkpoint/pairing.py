"""Which of a checkpoint's models and optimizers each one here is. Pure: plain values."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

Pair = tuple[str, str]
Names = Mapping[str, Collection[str]]


@dataclass(frozen=True, slots=True)
class Paired:
    """What was found.

    Attributes:
        pairs: What is there, by what is here.
        by_order: Those here of which nothing but the order of making told which they are.
        undecided: Those here of which nothing tells it.
        free: Those there that each of them may be.
    """

    pairs: Mapping[str, str]
    by_order: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    free: tuple[str, ...] = ()


def paired(
    here: Sequence[str], there: Sequence[str], fits: Set[Pair], called: Names, was_called: Names
) -> Paired:
    """Return which is which: what alone fits, what fits under the same name, what is left.

    Args:
        here: In the order of making.
        there: Likewise.
        fits: What could be what, (here, there).
        called: The names of the variables that lead to each one here; none where none does.
        was_called: Likewise there. Older checkpoints tell none.

    Returns:
        Where names are told on both sides and leave a choice, or one side has more, the order
        decides nothing: it is as likely to be another one as they are.
    """
    is_even = len(here) == len(there)
    is_told = all(called[h] for h in here) and all(was_called[t] for t in there)
    named = {(h, t) for h in here for t in there if set(called[h]) & set(was_called[t])}
    # Places in a list or an object may be in another order; a variable of its own is its name.
    own = {
        (h, t) for h, t in named if any(n.isidentifier() for n in {*called[h]} & {*was_called[t]})
    }
    found: dict[str, str] = {}
    # Of more than there are, one that alone fits may be a stranger that looks the same.
    for possible in (fits if is_even or not is_told else set(), fits & own, fits & named, named):
        _add_certain(possible, found)
    left = [h for h in here if h not in found]
    free = [t for t in there if t not in found.values()]
    if not is_even:
        # Where no name is told there, what no variable leads to here is left over: something else
        # holds its parameters still. Of another name there, the one here may be a stranger.
        kept = [h for h in left if called[h]]
        is_left_over = len(kept) == len(free) == 1 and not was_called[free[0]]
        if is_left_over and (kept[0], free[0]) in fits:
            return Paired(found | {kept[0]: free[0]})
        is_open = any((h, t) in fits for h in left for t in free)
        return Paired(found, undecided=tuple(left), free=tuple(free)) if is_open else Paired(found)
    if len(left) == 1:
        return Paired(found | dict(zip(left, free, strict=True)))
    if all(called[h] for h in left) and all(was_called[t] for t in free):
        return Paired(found, undecided=tuple(left), free=tuple(free))
    return Paired(found | dict(zip(left, free, strict=True)), by_order=tuple(left))


def _add_certain(possible: Set[Pair], found: dict[str, str]) -> None:
    """Add the pairs of which one side has no other choice, and which no such pair contradicts."""
    while True:
        open_ = {(h, t) for h, t in possible if h not in found and t not in found.values()}
        only = {
            (h, t)
            for h, t in open_
            if sum(h == other for other, _ in open_) == 1
            or sum(t == other for _, other in open_) == 1
        }
        certain = {
            (h, t) for h, t in only if sum(h == other or t == more for other, more in only) == 1
        }
        if not certain:
            return
        found.update(certain)
