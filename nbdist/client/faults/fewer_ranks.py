"""Go on with another number of ranks: fewer where some have no process or no host any more.

Numbers of ranks have no gaps, so the highest go. A lost rank below them gets a new process, in the
place that they leave. Main thread; every rank's main thread is idle.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.launchers.base import NoHostError
from nbdist.client.cluster.process_group import Answers
from nbdist.client.faults.advice import WhatRan
from nbdist.client.faults.repair_report import Repaired, describe, describe_replacements
from nbdist.shared.errors import ClusterError, NBDistError, StartError
from nbdist.shared.text import counted

log = logging.getLogger(__name__)

MOST_ROUNDS = 3
STILL_THERE = " Variables of living ranks can still be pulled."  # ends what `broken` says
_ANSWER_S = 30.0


def go_on_without(
    cluster: Cluster, irreplaceable: Collection[int], ran: WhatRan
) -> tuple[str, ...]:
    """Go on with fewer ranks where some cannot be replaced: as many as the cell's layouts allow.

    The group is one that failed to form, and the cluster is `broken`.

    Returns:
        What was done, in sentences.

    Raises:
        ClusterError: No number of ranks fits, or no rank is left that holds anything.
        StartError: The ranks that are left could not form the group. The cluster is `broken`
            still, either way.
    """
    why = cluster.broken
    left = [rank for rank in cluster.living() if rank not in irreplaceable]
    n = most_ranks(left, _fitting(cluster, left), len(left))
    if n == 0:
        raise ClusterError(f"{ran.title}'s layouts fit no smaller number of ranks.")
    cluster.broken = None
    try:
        done = _shrink(cluster, n, left)
    except NBDistError as error:
        cluster.broken = why
        raise StartError(f"Nor could {counted(n, 'rank')} go on.", why=error.what) from error
    first = (why or "").removesuffix(STILL_THERE)
    return (f"{first} {ran.title} goes on with {counted(n, 'rank')}.", *done.lines[1:])


def go_on_with_room(cluster: Cluster, lacking: NoHostError) -> Repaired:
    """Go on with as many ranks as the hosts that are left take; dead ones are replaced.

    Where the cell's layouts allow no such number it is the largest that there are slots for.

    Raises:
        NBDistError: The ranks that are left could not form a group.
    """
    room = lacking.room
    left = cluster.living()
    if not left or not room:
        raise StartError("No rank is left that holds anything.", why=lacking.why)
    if min(left) >= room:
        # All who hold anything would go. Who stays gets it from them first, on crowded hosts.
        new = cluster.dead()
        cluster.replace(new, crowded=True)
        first = describe(cluster.recover(new), _pids(cluster, new))
        done = _shrink(cluster, room, range(len(cluster.ranks)))
        lines, is_whole = (*first.lines, *done.lines), first.is_whole and done.is_whole
        return Repaired(lines, tuple(new), is_whole, first.is_cloned)
    return _shrink(cluster, most_ranks(left, _fitting(cluster, left), room) or room, left)


def most_ranks(left: Collection[int], fitting: Collection[int], room: int) -> int:
    """Return with how many ranks to go on: 0 for none, where no rank would be one that is left.

    Args:
        left: The ranks that live on.
        fitting: Numbers of ranks that the cell's layouts allow.
        room: Most ranks that there can be.
    """
    return max((n for n in fitting if n <= room and min(left) < n), default=0)


def form(cluster: Cluster, n: int, new: Collection[int]) -> Repaired:
    """Let all ranks leave the group and form the next of `n`, with another try after a fault.

    Args:
        cluster: Whose group it is.
        n: Ranks from then on.
        new: Those of them whose processes are new.

    Raises:
        NBDistError: The group was not formed.
    """
    replacements = set(new)
    for attempt in range(1, MOST_ROUNDS + 1):
        try:
            stay = [rank for rank in range(n) if rank not in replacements]
            left = cluster.group.leave(stay)
            cluster.drop([rank for rank in cluster.ranks if rank >= n])
            answers = cluster.form(n, sorted(replacements))
        except NBDistError:
            dead = {rank for rank in cluster.dead() if rank < n}
            if attempt == MOST_ROUNDS or cluster.broken or len(replacements | dead) == n:
                raise
            log.exception("The group of %d ranks was not created", n)
            replacements |= dead
            cluster.replace(sorted(replacements), n)
        else:
            return _describe(n, answers, _pids(cluster, replacements), left)
    raise AssertionError("the last attempt returns or raises")


def _shrink(cluster: Cluster, n: int, left: Collection[int]) -> Repaired:
    """Go on with `n` ranks, of which those in `left` have processes."""
    cluster.events.note("scale", begins=len(cluster.ranks), ends=n)
    new = [rank for rank in range(n) if rank not in left]
    gone = cluster.group.leave([rank for rank in left if rank < n])
    cluster.drop([rank for rank in cluster.ranks if rank >= n])
    if new:
        cluster.replace(new, n)
    done = form(cluster, n, new)
    lines = list(done.lines)
    if stale := _stale(gone):
        lines.append(stale)
    if not new:  # who is left has not been brought to one step: new ranks come with that
        lines += describe(cluster.recover(), {}, is_news=False).lines
    is_whole = done.is_whole and not any(answer["models"] for answer in gone.values())
    return Repaired(tuple(lines), tuple(new), is_whole, done.is_cloned)


def _fitting(cluster: Cluster, left: Sequence[int]) -> list[int]:
    if not left:
        return []
    counts = list(range(1, len(cluster.ranks) + 1))
    asked = cluster.requests.ask(left[0], "layout.fitting", counts=counts)
    found: list[int] = asked.result(_ANSWER_S)
    return found


def _pids(cluster: Cluster, ranks: Collection[int]) -> dict[int, int]:
    return {rank: cluster.ranks[rank].pid for rank in ranks}


def _describe(n: int, answers: Answers, pids: Mapping[int, int], left: Answers) -> Repaired:
    lines = [f"There are {n} ranks now." if n > 1 else "There is 1 rank now."]
    lines += describe_replacements(answers, pids, replaced=False)
    if stale := _stale(left):
        lines.append(stale)
    is_cloned = all(answers[rank].get("cloned") is not None for rank in pids)
    has_models = any(answer["models"] for answer in left.values())
    return Repaired(tuple(lines), tuple(sorted(pids)), is_cloned and not has_models, is_cloned)


def _stale(left: Mapping[int, Mapping[str, Any]]) -> str:
    """Return what cannot be used any more, in a sentence, of what ranks answered as they left."""
    stale = list(dict.fromkeys(what for answer in left.values() for what in answer["stale"]))
    sharded = list(dict.fromkeys(what for answer in left.values() for what in answer["sharded"]))
    said = f"No longer usable, create again: {', '.join(stale)}." if stale else ""
    if sharded:
        said += (
            f" What was sharded over the ranks is lost with them: {', '.join(sharded)}. Restore a "
            "checkpoint, or start with --peer-snapshots and spare hosts."
        )
    return said.strip()
