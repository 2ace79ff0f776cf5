"""More or fewer ranks without a new start: `%dist scale`.

New processes come up first, beside a group that works on; only then do the ranks leave it and form
the next. What can go wrong most easily therefore costs nothing. See `engine/recovery/resize.py`
for what follows to the new group and what does not.

Main thread; every rank's main thread is idle.
"""

import logging
from collections.abc import Sequence

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.faults.fewer_ranks import form
from nbdist.client.faults.recovery import repair
from nbdist.shared.errors import NBDistError, StartError
from nbdist.shared.text import name_ranks

log = logging.getLogger(__name__)


def scale(cluster: Cluster, n: int) -> tuple[str, ...]:
    """Go on with `n` ranks; those that remain keep all they hold. Dead ones are replaced first.

    Returns:
        What was done, in sentences.

    Raises:
        StartError: New ranks did not start; the cluster is unchanged. Or the ranks could not
            form the group; the cluster is `broken` then.
    """
    lines = cluster.reopen() if n >= len(cluster.ranks) or cluster.dead() else []
    if cluster.dead():
        lines += repair(cluster, reported=cluster.dead()).lines
    if cluster.broken:
        raise cluster.broken_error()
    before = len(cluster.ranks)
    if n == before:
        return (*lines, f"There are {n} ranks already.")
    cluster.events.note("scale", begins=before, ends=n)
    new = list(range(before, n))
    if new:
        _start(cluster, new, n)
    try:
        return (*lines, *form(cluster, n, new).lines)
    except NBDistError as error:
        if not new:
            raise _broken(cluster, n, error) from error
        return _go_back(cluster, before, error)


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


def _go_back(cluster: Cluster, before: int, error: NBDistError) -> tuple[str, ...]:
    """Form the group as it was before new ranks had come; `error` says why they could not stay."""
    try:
        form(cluster, before, [])
    except NBDistError as again:
        raise _broken(cluster, before, again) from error
    raise StartError(
        f"The new ranks could not join; there are {before} ranks again.", why=str(error)
    ) from error


def _broken(cluster: Cluster, n: int, error: NBDistError) -> StartError:
    cluster.broken = cluster.broken or f"The group of {n} ranks could not be created: {error.what}"
    return StartError(cluster.broken, do=cluster.broken_error().do)
