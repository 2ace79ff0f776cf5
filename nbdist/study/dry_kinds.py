"""What ranks do that were not run, as others of their kind were and did the same. Pure.

Ranks of a mesh call groups of their own: of an axis those of all ranks follow from one's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nbdist.study.dry import Call, Trace

Group = tuple[str, tuple[int, ...]]  # its name, and its ranks in the world


def told_apart(traces: Mapping[int, Trace], world_size: int) -> set[int]:
    """Return ranks that may do other than those of their kind: peers, and ends of a mesh's axes."""
    found = {call.peer for one in traces.values() for call in one.calls if call.peer >= 0}
    for rank, one in traces.items():
        ends = {rank}
        for ranks in {call.ranks for call in one.calls if 1 < len(call.ranks) < world_size}:
            size, step = len(ranks), max(ranks[1] - ranks[0], 1)
            starts = {end - end // step % size * step for end in ends}
            ends = {start + at * step for start in starts for at in (0, size - 1)}
        found |= {end for end in ends if end < world_size}
    return found


def of_kind(
    run: Mapping[int, Trace], kind: Sequence[int], world_size: int
) -> dict[int, Trace] | None:
    """Return what all ranks of a kind do, of which some were run; None where these differ."""
    if len(run) == len(kind):
        return dict(run)
    first, *others = run
    if any(one.asks_rank for one in run.values()):
        return None
    for rank in others:
        if (moved := _moved(run[first], first, rank, world_size)) is None:
            return None
        if replace(_bare(run[rank]), calls=()) != replace(_bare(moved), calls=()):
            return None
        if run[rank].calls != moved.calls:
            return None
    values = [
        {one.branches[at].value for one in run.values()} for at in range(len(run[first].branches))
    ]
    if any(len(of) not in (1, len(run)) for of in values):
        return None  # equal on some of them
    found = {}
    for rank in kind:
        moved = run.get(rank) or _moved(run[first], first, rank, world_size)
        if moved is None:
            return None
        if rank not in run:
            branches = (
                one if len(of) == 1 else replace(one, value=hash((one.value, rank)))
                for one, of in zip(moved.branches, values, strict=True)
            )
            peak = max(one.peak for one in run.values())
            moved = replace(moved, branches=tuple(branches), peak=peak)
        found[rank] = moved
    return found


def _bare(trace: Trace) -> Trace:
    """Return a trace without what may differ on ranks of a kind."""
    return replace(trace, peak=0, branches=tuple(replace(one, value=0) for one in trace.branches))


def _moved(trace: Trace, rank: int, to: int, world_size: int) -> Trace | None:
    """Return what another rank does that does the same; None where its groups are not known."""
    groups: dict[Group, Group | None] = {}
    calls: list[Call] = []
    for call in trace.calls:
        own = call.group, call.ranks
        if len(call.ranks) in (0, world_size):
            calls.append(call)
            continue
        if own not in groups:
            groups[own] = _of_axis(own, rank, to, world_size)
        if (other := groups[own]) is None:
            return None
        name, ranks = other
        peer = ranks[call.ranks.index(call.peer)] if call.peer >= 0 else -1
        calls.append(replace(call, group=name, ranks=ranks, peer=peer))
    return replace(trace, calls=tuple(calls))


def _of_axis(group: Group, rank: int, to: int, world_size: int) -> Group | None:
    """Return the group of another rank on the axis of a mesh that a group is of."""
    name, ranks = group
    size, step = len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 0
    if step < 1 or world_size % (size * step) or not name.isdigit():
        return None

    def of(one: int) -> tuple[int, tuple[int, ...]]:
        start = one - one // step % size * step
        number = start // (size * step) * step + start % step
        return number, tuple(range(start, start + size * step, step))

    (number, own), (other, others) = of(rank), of(to)
    return None if own != ranks else (str(int(name) + other - number), others)
