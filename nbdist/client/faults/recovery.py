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
from dataclasses import dataclass, field, replace

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
    known = {cluster.ranks[rank].serial for rank in reported}
    rounds = _Rounds(cluster, set(anew), known, last_words, is_news=is_news)
    for _ in range(MOST_ROUNDS):
        done = rounds.attempt()
        if done is not None:
            return replace(done, lines=(*rounds.ends, *done.lines))
        if rounds.is_hopeless():
            break
    return rounds.give_up()


@dataclass(slots=True)
class _Rounds:
    """The rounds of one repair.

    Attributes:
        new: Ranks that get new processes; those that die meanwhile are added.
        known: Serial numbers of processes whose end has been reported.
        last_words: As in `repair`.
        is_news: As in `repair`.
        ends: How the ranks ended that have died in a round.
        why: Why the newest round failed.
    """

    cluster: Cluster
    new: set[int]
    known: set[int]
    last_words: Callable[[int], LastOutput]
    is_news: bool
    ends: list[str] = field(default_factory=list)
    why: str = ""
    _deaths: Counter[int] = field(default_factory=Counter)
    _no_new_round: float = field(default_factory=lambda: time.monotonic() + _NO_NEW_ROUND_S)

    def attempt(self) -> Repaired | None:
        """Replace what is dead and recover all ranks; None where that failed, as `why` says."""
        self._note_dead()
        try:
            if self.new:
                self.cluster.replace(sorted(self.new))
            answers = self.cluster.recover(self.new)
        except NoHostError as lacking:
            return self._go_on_with_room(lacking)
        except NBDistError as error:
            log.exception("The recovery failed")
            self._note_failed(error)
            return None
        except BaseException as error:
            _break(self.cluster, self.new, f"{type(error).__name__}: {error}")
            raise
        pids = {rank: self.cluster.ranks[rank].pid for rank in self.new}
        return describe(answers, pids, is_news=self.is_news or bool(self.new))

    def is_hopeless(self) -> bool:
        """Return whether another round would fail as well, or comes too late."""
        is_dying = any(count >= MOST_DEATHS for count in self._deaths.values())
        return is_dying or bool(self.cluster.broken) or time.monotonic() > self._no_new_round

    def give_up(self) -> Repaired:
        """Mark the cluster as broken, and return what is to be said of it."""
        self._note_dead()
        new = tuple(sorted(self.new))
        irreplaceable = () if self.cluster.broken else new
        _break(self.cluster, new, self.why)
        lines = (*self.ends, self.cluster.broken or "")
        return Repaired(lines, new, False, False, irreplaceable)

    def _note_dead(self) -> None:
        self.ends += _ends(self.cluster, self.known, self.last_words)
        self.new |= set(self.cluster.dead())

    def _go_on_with_room(self, lacking: NoHostError) -> Repaired | None:
        """Continue with as many ranks as there is room for."""
        try:
            done = go_on_with_room(self.cluster, lacking)
        except NBDistError as error:
            log.exception("There is no way to go on with fewer ranks")
            self.why = (
                f"{lacking.what.rstrip('.')} ({lacking.why.rstrip('.')}), and "
                f"{error.what[0].lower()}{error.what[1:]}"
            )
            return None
        return replace(done, has_fewer=True)

    def _note_failed(self, error: NBDistError) -> None:
        """Note why a round failed, and who needs a new process in the next one."""
        self.why = error.what
        self._deaths.update(self.new & set(self.cluster.dead()))
        spent = _without_gpu(error)
        if spent - self.new and set(self.cluster.living()) - self.new - spent:
            self.new |= spent
            self.ends.append(f"{begin_with_ranks(spent)} could make no CUDA call any more.")


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
