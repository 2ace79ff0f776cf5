"""Put a cluster together again: new processes for dead ranks, then one recovery of all ranks.

What a recovery does on the ranks stands in `engine/recovery/recovery.py`. Here it is asked for,
begun again when another fault strikes in the midst of it, and told: each repair ends in a few
sentences, or in a cluster that is `broken` with its reason.

Threads: the main one, and every rank's main thread is idle. Interrupts are counted by the caller:
a repair that is left half done would leave ranks that wait for each other.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.launchers.base import NoHostError
from nbdist.client.cluster.requests import RankFailedError
from nbdist.client.faults.fewer_ranks import MOST_ROUNDS, STILL_THERE, go_on_with_room
from nbdist.client.faults.repair_report import Repaired, describe
from nbdist.client.faults.stderr_tail import LastOutput
from nbdist.shared import gpu_errors
from nbdist.shared.errors import NBDistError, StartError
from nbdist.shared.text import begin_with_ranks

log = logging.getLogger(__name__)

MOST_DEATHS = 2  # of one rank's new processes; a third would die of the same
_NO_NEW_ROUND_S = 60.0


def no_words(_rank: int) -> LastOutput:
    """Say of every rank that it wrote nothing."""
    return LastOutput()


def repair(
    cluster: Cluster,
    anew: Iterable[int] = (),
    *,
    is_news: bool = True,
    reported: Iterable[int] = (),
    last_words: Callable[[int], LastOutput] = no_words,
) -> Repaired:
    """Replace dead ranks and form the group of all ranks again.

    A fault or a death in the midst begins it again, `MOST_ROUNDS` times in all. After that, or when
    a new process dies as often as `MOST_DEATHS`, the cluster is `broken`, and the lines say why.
    A rank whose CUDA context has ended gets a new process where another one keeps its own: it can
    take no part.

    Args:
        cluster: Whose ranks are all idle.
        anew: Living ranks that get new processes as well.
        is_news: Whether to say that the group was re-created; that new processes came always is.
        reported: Dead ranks whose end the caller tells; of others, and of all that die meanwhile,
            the cause is among the lines.
        last_words: Returns what a rank that died wrote last.
    """
    if cluster.broken:
        return Repaired((cluster.broken,), is_whole=False, is_cloned=False)
    new = set(anew)
    deaths: Counter[int] = Counter()
    known = {cluster.ranks[rank].serial for rank in reported}
    ends: list[str] = []
    why = ""
    no_new_round = time.monotonic() + _NO_NEW_ROUND_S
    for _ in range(MOST_ROUNDS):
        ends += _ends(cluster, known, last_words)
        new |= set(cluster.dead())
        try:
            if new:
                cluster.replace(sorted(new))
            answers = cluster.recover(new)
        except NoHostError as lacking:
            try:
                done = go_on_with_room(cluster, lacking)
            except NBDistError as error:
                log.exception("There is no way to go on with fewer ranks")
                why = (
                    f"{lacking.what.rstrip('.')} ({lacking.why.rstrip('.')}), and "
                    f"{error.what[0].lower()}{error.what[1:]}"
                )
                if cluster.broken or time.monotonic() > no_new_round:
                    break
                continue
            return replace(done, lines=(*ends, *done.lines), has_fewer=True)
        except NBDistError as error:
            log.exception("The recovery failed")
            why = error.what
            deaths.update(new & set(cluster.dead()))
            spent = _without_gpu(error)
            if spent - new and set(cluster.living()) - new - spent:
                new |= spent
                ends.append(f"{begin_with_ranks(spent)} could make no CUDA call any more.")
            is_hopeless = any(count >= MOST_DEATHS for count in deaths.values())
            if is_hopeless or cluster.broken or time.monotonic() > no_new_round:
                break
        except BaseException as error:
            _break(cluster, new, f"{type(error).__name__}: {error}")
            raise
        else:
            pids = {rank: cluster.ranks[rank].pid for rank in new}
            done = describe(answers, pids, is_news=is_news or bool(new))
            return replace(done, lines=(*ends, *done.lines))
    ends += _ends(cluster, known, last_words)
    new |= set(cluster.dead())
    irreplaceable = () if cluster.broken else tuple(sorted(new))
    _break(cluster, new, why)
    lines = (*ends, cluster.broken or "")
    return Repaired(lines, tuple(sorted(new)), False, False, irreplaceable)


def _without_gpu(error: NBDistError) -> set[int]:
    """Return the rank whose process can make no CUDA call any more, if that is why it failed."""
    if not isinstance(error, RankFailedError):
        return set()
    known = gpu_errors.explain(error.what)
    return {error.rank} if known and known.ends_context else set()


def _ends(cluster: Cluster, known: set[int], last_words: Callable[[int], LastOutput]) -> list[str]:
    """Return how dead ranks ended whose processes are not among `known`, and add them there."""
    found = []
    for rank in cluster.dead():
        state = cluster.ranks[rank]
        if state.serial not in known:
            known.add(state.serial)
            words = " / ".join(last_words(rank).lines)
            wrote = f" Its last output: {words}." if words else ""
            found.append(f"Rank {rank} died during the recovery: {state.ended}.{wrote}")
    return found


def restart(cluster: Cluster, ranks: Iterable[int]) -> Repaired:
    """Give `ranks` new processes; the others keep all they hold.

    A cluster that is `broken`, or loses every rank, is made again as a whole.

    Raises:
        StartError: The ranks did not come up; the cluster is `broken` then.
    """
    chosen = set(ranks)
    said = tuple(cluster.reopen())
    if cluster.broken or chosen >= set(cluster.ranks):
        cluster.rebuild()
        return Repaired(said)
    repaired = repair(cluster, chosen, reported=cluster.dead())
    if cluster.broken:
        raise StartError(cluster.broken, do=cluster.broken_error().do)
    return replace(repaired, lines=(*said, *repaired.lines))


def _break(cluster: Cluster, new: Iterable[int], why: str) -> None:
    """Mark the cluster as broken, unless it already is for a reason of its own."""
    new = sorted(new)
    what = (
        f"{begin_with_ranks(new)} could not be replaced"
        if new
        else "The process group could not be re-created"
    )
    kept = STILL_THERE if cluster.living() else ""
    cluster.broken = cluster.broken or f"{what}: {why.rstrip('.')}.{kept}"
