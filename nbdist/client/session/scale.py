"""More or fewer ranks without a new start: `%dist scale`.

New processes come up first, beside a group that works on; only then do the ranks leave it and form
the next. What can go wrong most easily therefore costs nothing. See `engine/recovery/resize.py`
for what follows to the new group and what does not.

Main thread; every rank's main thread is idle.
"""

import logging
from collections.abc import Collection, Mapping, Sequence

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.process_group import Answers
from nbdist.client.faults.recovery import MOST_ROUNDS, describe, describe_newcomers, repair
from nbdist.errors import ClusterError, NBDistError, StartError
from nbdist.formatting import counted
from nbdist.ranks import name_ranks

log = logging.getLogger(__name__)

_ANSWER_S = 30.0


def scale(cluster: Cluster, n: int) -> tuple[str, ...]:
    """Go on with `n` ranks; those that remain keep all they hold. Dead ones are replaced first.

    Returns:
        What was done, in sentences.

    Raises:
        StartError: New ranks did not start; the cluster is unchanged. Or the ranks could not
            form the group; the cluster is `broken` then.
    """
    before = len(cluster.ranks)
    lines = list(repair(cluster, told=cluster.dead()).lines) if cluster.dead() else []
    if cluster.broken:
        raise cluster.broken_error()
    if n == before:
        return (*lines, f"There are {n} ranks already.")
    cluster.events.note("scale", begins=before, ends=n)
    new = list(range(before, n))
    if new:
        _start(cluster, new, n)
    try:
        return (*lines, *_form(cluster, n, new))
    except NBDistError as error:
        if not new:
            raise _broken(cluster, n, error) from error
        return _go_back(cluster, before, error)


def go_on_without(cluster: Cluster, irreplaceable: Collection[int]) -> tuple[str, ...]:
    """Go on with fewer ranks where some cannot be replaced: as many as the cell's layouts allow.

    Numbers of ranks have no gaps, so the highest go. A lost rank below them gets a new process,
    in the place that they leave. Every rank is idle, and the group is one that failed to form.

    Returns:
        What was done, in sentences.

    Raises:
        ClusterError: No number of ranks fits, or no rank is left that holds anything.
        StartError: The ranks that are left could not form the group. The cluster is `broken`
            still, either way.
    """
    why, before = cluster.broken, len(cluster.ranks)
    left = [rank for rank in cluster.living() if rank not in irreplaceable]
    n = most_ranks(left, _fitting(cluster, left))
    if n == 0:
        raise ClusterError("The cell's layouts fit no smaller number of ranks.")
    cluster.events.note("scale", begins=before, ends=n)
    cluster.broken = None
    new = [rank for rank in range(n) if rank not in left]
    try:
        cluster.group.leave([rank for rank in left if rank < n])
        cluster.drop([rank for rank in cluster.ranks if rank >= n])
        if new:
            cluster.replace(new, n)
        lines = _form(cluster, n, new)
        if not new:  # who is left has not been brought to one step: new ranks come with that
            lines += describe(cluster.recover(), {}, is_news=False).lines
    except NBDistError as error:
        cluster.broken = why
        raise StartError(f"Nor could {counted(n, 'rank')} go on.", why=error.what) from error
    first = (why or "").partition("Variables of")[0]
    return (f"{first}The cell goes on with {counted(n, 'rank')}.", *lines[1:])


def most_ranks(left: Collection[int], fitting: Collection[int]) -> int:
    """Return with how many ranks to go on: 0 for none, where no rank would be one that is left."""
    return max((n for n in fitting if n <= len(left) and min(left) < n), default=0)


def _fitting(cluster: Cluster, left: Sequence[int]) -> list[int]:
    if not left:
        return []
    counts = list(range(1, len(left) + 1))
    asked = cluster.requests.ask(left[0], "layout.fitting", counts=counts)
    found: list[int] = asked.result(_ANSWER_S)
    return found


def _start(cluster: Cluster, new: Sequence[int], n: int) -> None:
    try:
        cluster.replace(new, n)
    except BaseException as error:
        cluster.drop(new)
        if not isinstance(error, NBDistError):
            raise
        raise StartError(
            f"{name_ranks(new).capitalize()} did not start; the cluster is unchanged.",
            why=" ".join(filter(None, (error.what, error.why))),
            do=error.do or "%dist doctor",
        ) from error


def _form(cluster: Cluster, n: int, new: Sequence[int]) -> list[str]:
    """Let all ranks leave the group and form the next, with another try after a fault in it."""
    newcomers = set(new)
    for attempt in range(1, MOST_ROUNDS + 1):
        try:
            stay = [rank for rank in range(n) if rank not in newcomers]
            left = cluster.group.leave(stay)
            cluster.drop([rank for rank in cluster.ranks if rank >= n])
            answers = cluster.form(n, sorted(newcomers))
        except NBDistError:
            dead = {rank for rank in cluster.dead() if rank < n}
            if attempt == MOST_ROUNDS or cluster.broken or len(newcomers | dead) == n:
                raise
            log.exception("The group of %d ranks was not created", n)
            newcomers |= dead
            cluster.replace(sorted(newcomers), n)
        else:
            pids = {rank: cluster.ranks[rank].pid for rank in newcomers}
            return _describe(n, answers, pids, left)
    raise AssertionError("the last attempt returns or raises")


def _go_back(cluster: Cluster, before: int, error: NBDistError) -> tuple[str, ...]:
    """Form the group as it was before new ranks had come; `error` says why they could not stay."""
    try:
        _form(cluster, before, [])
    except NBDistError as again:
        raise _broken(cluster, before, again) from error
    raise StartError(
        f"The new ranks could not join; there are {before} ranks again.", why=str(error)
    ) from error


def _broken(cluster: Cluster, n: int, error: NBDistError) -> StartError:
    cluster.broken = cluster.broken or f"The group of {n} ranks could not be created: {error.what}"
    return StartError(cluster.broken, do=cluster.broken_error().do)


def _describe(n: int, answers: Answers, pids: Mapping[int, int], left: Answers) -> list[str]:
    lines = [f"There are {n} ranks now." if n > 1 else "There is 1 rank now."]
    lines += describe_newcomers(answers, pids, replaced=False)
    stale = list(dict.fromkeys(what for answer in left.values() for what in answer["stale"]))
    if stale:
        lines.append(f"No longer usable, create again: {', '.join(stale)}.")
    return lines
