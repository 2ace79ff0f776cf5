"""Choose the step that all ranks look into, by what each says of those that it has kept. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nbdist.shared.errors import UsageError
from nbdist.shared.text import begin_with_ranks, name_ranks

_HOW = (
    "%%distributed --guard, or layout.step(..., skip_nonfinite=True), leaves a step out that is "
    "not finite, and --keep keeps the others, too"
)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a rank says of a step that it has kept.

    Attributes:
        cell: The number of its cell.
        step: Its number there.
        is_of_all: Whether all ranks have made it, or left it out.
        forwards: How many of its forwards can run again.
        why_not: Why none can; "" where they can.
        has_weights: Whether its weights are kept.
        why_not_float32: Why its forwards cannot run in float32; "" where they can.
        losses: Of how many forwards the loss is known.
        why_no_backward: Why no backward can run again; "" where one can.
        is_left_out: Whether it was left out.
        runs: By the number of each step from which on steps can be made again up to this one: of
            each of them, how many forwards it has.
        why_no_run: Why there is none.
        is_alone: Whether its forward needs no other rank.
    """

    cell: int
    step: int
    is_of_all: bool
    forwards: int = 0
    why_not: str = ""
    has_weights: bool = False
    why_not_float32: str = ""
    losses: int = 0
    why_no_backward: str = ""
    is_left_out: bool = True
    runs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    why_no_run: str = ""
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The step that is looked into, and how; the same on all ranks.

    Attributes:
        cell: The number of its cell.
        step: Its number there.
        ranks: Those that look into it.
        why_not: Why no forward runs again, by rank; empty where it does.
        has_weights: Whether it does so with the weights that it had.
        no_backward: Why no backward runs again, by rank; empty where it can.
        is_left_out: Whether it was left out.
        begins: The step from which on steps are made again up to it; None: none is.
        no_run: Why none is, by rank; empty where it is not for a rank, or was left out.
    """

    cell: int
    step: int
    ranks: tuple[int, ...]
    why_not: Mapping[int, str]
    has_weights: bool
    no_backward: Mapping[int, str]
    is_left_out: bool = True
    begins: int | None = None
    no_run: Mapping[int, str] = field(default_factory=dict)


def choose(
    everyone: Sequence[Sequence[StepFacts]],
    step: int | None,
    *,
    fp32: bool = False,
    rank: int | None = None,
) -> Choice:
    """Return which step to look into, by what all ranks have kept.

    Args:
        everyone: By rank.
        step: Its number; None for the newest that was left out, or else the newest.
        fp32: Its forward is to run in float32.
        rank: The one that is asked about; others take part where it needs them. None: all.

    Raises:
        UsageError: There is none, ranks that left it out have it no more, or it cannot run in
            float32 and is to.
    """
    newest = max((one.cell for kept in everyone for one in kept), default=0)
    found = [{one.step: one for one in kept if one.cell == newest} for kept in everyone]
    step = _number(found, step)
    by_rank = {rank: kept[step] for rank, kept in enumerate(found) if step in kept}
    is_left_out = any(one.is_left_out for one in by_rank.values())
    without = [rank for rank in range(len(everyone)) if rank not in by_rank]
    is_of_all = any(one.is_of_all for one in by_rank.values())
    if rank is not None:
        mine = _of_rank(by_rank, rank, step, world=len(everyone))
        # Others take part where they can: a module may have collectives of its own.
        if not is_of_all or (without and mine.is_alone and mine.has_weights):
            by_rank, without = {rank: mine}, []
    if without and is_of_all:
        raise UsageError(
            f"{begin_with_ranks(without)} {'has' if len(without) == 1 else 'have'} nothing of step "
            f"{step} any more.",
            why="a new process has no evidence, and a forward runs on all ranks or on none",
            do="%dist replay --from last, if the cell had --keep; else train on to the next one",
        )
    why_not = {rank: one.why_not for rank, one in by_rank.items() if one.why_not}
    counts = {one.forwards for one in by_rank.values()}
    if not why_not and len(counts) > 1 and is_of_all:
        why_not = dict.fromkeys(by_rank, "ranks have made, or kept, other numbers of forwards")
    no_backward = {r: one.why_no_backward for r, one in by_rank.items() if one.why_no_backward}
    if not no_backward and len({one.losses for one in by_rank.values()}) > 1:
        no_backward = dict.fromkeys(by_rank, "ranks know the losses of other numbers of forwards")
    refused = {rank: one.why_not_float32 for rank, one in by_rank.items() if one.why_not_float32}
    if fp32 and refused:
        raise UsageError(
            f"The forward of step {step} cannot run in float32 on {name_ranks(refused)}.",
            why=next(iter(refused.values())),
            do=f"%dist replay {step} runs it as it was",
        )
    has_weights = all(one.has_weights for one in by_rank.values())
    ranks = tuple(by_rank)
    if is_left_out:
        return Choice(newest, step, ranks, why_not, has_weights, no_backward)
    begins, no_run = None, dict[int, str]()
    if not why_not:
        begins, no_run = _begin(by_rank)
    if begins is None and not has_weights and not why_not:
        why_not = no_run
    has_weights = has_weights or begins is not None
    parts = (newest, step, ranks, why_not, has_weights, no_backward)
    return Choice(*parts, is_left_out=False, begins=begins, no_run=no_run)


def _number(found: Sequence[Mapping[int, StepFacts]], step: int | None) -> int:
    """Return the number of the step that is asked for."""
    steps = sorted(set().union(*found))
    left_out = sorted({n for kept in found for n, one in kept.items() if one.is_left_out})
    if not steps:
        raise UsageError(
            "No step is kept that was left out, so there is nothing to look into.",
            why=f"{_HOW}; none was since these ranks were started",
            do="train with one of them, then %dist replay",
        )
    # A fault ends ranks within a step: some have made it.
    whole = [n for n in steps if all(n in kept for kept in found)]
    newest = (left_out or whole or steps)[-1]
    if step is None:
        return newest
    if step not in steps:
        kept = "the newest steps that a cell has left out: " + ", ".join(map(str, left_out))
        if len(steps) > len(left_out):
            kept = f"the newest of a cell with --keep: {_ranges(steps)}"
        raise UsageError(
            f"Step {step} is not kept.", why=f"kept are {kept}", do=f"%dist replay {newest}"
        )
    return step


def _of_rank(by_rank: Mapping[int, StepFacts], rank: int, step: int, *, world: int) -> StepFacts:
    """Return what the rank says that is asked about."""
    if rank not in by_rank:
        others = f"it is kept by {name_ranks(by_rank)}"
        raise UsageError(
            f"Rank {rank} has nothing of step {step}.",
            why=others if 0 <= rank < world else f"there are ranks 0 to {world - 1}",
            do=f"%dist replay {step} --rank {min(by_rank)}",
        )
    return by_rank[rank]


def _begin(by_rank: Mapping[int, StepFacts]) -> tuple[int | None, dict[int, str]]:
    """Return the newest step from which all ranks can make steps again, or why there is none."""
    first, *others = [set(one.runs.items()) for one in by_rank.values()]
    common = first.intersection(*others)
    if common:
        return max(begins for begins, _ in common), {}
    reasons = {rank: one.why_no_run for rank, one in by_rank.items() if one.why_no_run}
    return None, reasons or dict.fromkeys(by_rank, "ranks have kept no weights of one step")


def _ranges(steps: Sequence[int]) -> str:
    """Return numbers in order as `3, 5-8`."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
