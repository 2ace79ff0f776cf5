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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbdist.client.cluster.cluster import Cluster
from nbdist.errors import NBDistError, StartError
from nbdist.formatting import counted
from nbdist.ranks import begin_with_ranks, name_ranks

log = logging.getLogger(__name__)

MOST_ROUNDS = 3
MOST_DEATHS = 2  # of one rank's new processes; a third would die of the same
_NO_NEW_ROUND_S = 60.0
_FEW_REFORMS = 10
_MOST_NAMES = 12  # of those that differ between ranks
_MOST_CHARS = 120  # of why a name was not cloned
_DESTROYED = (
    "The cell destroyed the process group; it was re-created. Models wrapped before belong to the "
    "old one: wrap them again."
)


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair has done.

    `lines` are sentences for people. `replaced` are the ranks with new processes. `is_cloned` tells
    whether these hold what a living rank holds, `is_whole` that nothing was lost with the ones
    before: shards have no copy. `irreplaceable` are the ranks whose new processes did not come or
    stay, where that is why the cluster is `broken`.
    """

    lines: tuple[str, ...] = ()
    replaced: tuple[int, ...] = ()
    is_whole: bool = True
    is_cloned: bool = True
    irreplaceable: tuple[int, ...] = ()


def no_words(_rank: int) -> Sequence[str]:
    """Say of every rank that it wrote nothing."""
    return ()


def repair(
    cluster: Cluster,
    anew: Iterable[int] = (),
    *,
    is_news: bool = True,
    told: Iterable[int] = (),
    last_words: Callable[[int], Sequence[str]] = no_words,
) -> Repaired:
    """Replace dead ranks and form the group of all ranks anew.

    A fault or a death in the midst begins it again, `MOST_ROUNDS` times in all. After that, or when
    a new process dies as often as `MOST_DEATHS`, the cluster is `broken`, and the lines say why.

    Args:
        cluster: Whose ranks are all idle.
        anew: Living ranks that get new processes as well.
        is_news: Whether to say that the group was re-created; that new processes came always is.
        told: Dead ranks whose end the caller tells; of others, and of all that die meanwhile, the
            cause is among the lines.
        last_words: Returns what a rank that died wrote last.
    """
    if cluster.broken:
        return Repaired((cluster.broken,), is_whole=False, is_cloned=False)
    new = set(anew)
    deaths: Counter[int] = Counter()
    known = {cluster.ranks[rank].pid for rank in told}
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
        except NBDistError as error:
            log.exception("The recovery failed")
            why = error.what
            deaths.update(new & set(cluster.dead()))
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


def _ends(
    cluster: Cluster, known: set[int], last_words: Callable[[int], Sequence[str]]
) -> list[str]:
    """Return how dead ranks ended whose processes are not among `known`, and add them there."""
    found = []
    for rank in cluster.dead():
        state = cluster.ranks[rank]
        if state.pid not in known:
            known.add(state.pid)
            words = " / ".join(last_words(rank))
            wrote = f" Its last output: {words}." if words else ""
            found.append(f"Rank {rank} died during the recovery: {state.cause}.{wrote}")
    return found


def restart(cluster: Cluster, ranks: Iterable[int]) -> Repaired:
    """Give `ranks` new processes; the others keep all they hold.

    A cluster that is `broken`, or loses every rank, is made anew as a whole.

    Raises:
        StartError: The ranks did not come up; the cluster is `broken` then.
    """
    chosen = set(ranks)
    if cluster.broken or chosen >= set(cluster.ranks):
        cluster.rebuild()
        return Repaired()
    repaired = repair(cluster, chosen, told=cluster.dead())
    if cluster.broken:
        raise StartError(cluster.broken, do=cluster.broken_error().do)
    return repaired


def _break(cluster: Cluster, new: Iterable[int], why: str) -> None:
    """Mark the cluster as broken, unless it already is for a reason of its own."""
    new = sorted(new)
    what = (
        f"{begin_with_ranks(new)} could not be replaced"
        if new
        else "The process group could not be re-created"
    )
    cluster.broken = cluster.broken or (
        f"{what}: {why.rstrip('.')}. Variables of living ranks can still be pulled."
    )


def describe(
    answers: Mapping[int, Mapping[str, Any]], pids: Mapping[int, int], *, is_news: bool = True
) -> Repaired:
    """Return what a recovery did, in sentences.

    Args:
        answers: What each rank answered, see `engine/recovery/recovery.py`.
        pids: The new ranks and their processes.
        is_news: Whether to say that the group was re-created.
    """
    lines = describe_newcomers(answers, pids, replaced=True)
    if any(answer.get("is_anew") for answer in answers.values()):
        lines.append(_DESTROYED)
    elif is_news:
        lines.append("The process group was re-created.")
    lines += _each_once(answers, "agreed")
    if (stale := _each_once(answers, "stale")) and is_news:
        lines.append(f"Not re-created, create them again: {', '.join(stale)}.")
    left = [said for a in answers.values() if (said := a.get("reforms_left")) is not None]
    if left and min(left) < _FEW_REFORMS:
        lines.append(
            f"It can be re-created {min(left)} more times. Use %dist restart soon, when "
            "the ranks hold nothing that you need."
        )
    clones = [answers[rank].get("cloned") for rank in pids]
    is_cloned = all(clone is not None for clone in clones)
    is_whole = is_cloned and not any(c["lost"] for c in clones if c)
    return Repaired(tuple(lines), tuple(sorted(pids)), is_whole, is_cloned)


def describe_newcomers(
    answers: Mapping[int, Mapping[str, Any]], pids: Mapping[int, int], *, replaced: bool
) -> list[str]:
    """Return what new ranks got, in sentences; `replaced` when others had been there before."""
    bare = [rank for rank in sorted(pids) if answers[rank].get("cloned") is None]
    lines = []
    if bare:
        who, one = begin_with_ranks(bare), len(bare) == 1
        new = f"pid{'' if one else 's'} {', '.join(str(pids[rank]) for rank in bare)}"
        if not replaced:
            is_, has = ("is", "has") if one else ("are", "have")
            lines.append(f"{who} {is_} new ({new}) and {has} no variables.")
        elif one:
            lines.append(f"{who} was replaced by a new process ({new}); its variables are lost.")
        else:
            lines.append(f"{who} were replaced by new processes ({new}); their variables are lost.")
    came = "was replaced by a new process" if replaced else "is new"
    for rank in sorted(set(pids) - set(bare)):
        lines += _cloned(f"Rank {rank} {came} (pid {pids[rank]})", rank, answers[rank]["cloned"])
    cloned = {rank: answers[rank]["cloned"] for rank in sorted(set(pids) - set(bare))}
    inexact = [line for told in cloned.values() for line in told.get("inexact", ())]
    # Of ranks that come beside others, the layouts that have no part for them are named by `scale`.
    lost = _lost(cloned) if replaced else []
    return [*lines, *lost, *dict.fromkeys(inexact), *_differing(cloned)]


def _lost(cloned: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return which sharded models cannot be used any more, in one sentence for all new ranks."""
    names = list(dict.fromkeys(name for told in cloned.values() for name in told["lost"]))
    if not names:
        return []
    held = [rank for rank, told in cloned.items() if told["lost"]]
    what = f"The shards of {', '.join(names)} that {name_ranks(held)} held are lost"
    return [f"{what}: build {'it' if len(names) == 1 else 'them'} again or restore a checkpoint."]


def _differing(cloned: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return what new ranks have of another rank's that was most likely made from its number."""
    alike: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for rank, told in cloned.items():
        if names := told.get("differ"):
            alike.setdefault((told["source"], tuple(names)), []).append(rank)
    return [
        f"These differ between ranks, and {name_ranks(ranks)} "
        f"{'has' if len(ranks) == 1 else 'have'} rank {source}'s: {_listed(names)}. "
        f"Create them again there: %%distributed -r {','.join(map(str, ranks))}."
        for (source, names), ranks in alike.items()
    ]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _cloned(came: str, rank: int, cloned: Mapping[str, Any]) -> list[str]:
    names = len(cloned["names"])
    line = f"{came}: {counted(names, 'name')} cloned from rank {cloned['source']}"
    random = cloned["random"]
    state = f"(seed {random['seed']}, rank {rank}, step {random['step']})"
    drawn = f"was derived from {state}"
    if random.get("is_own"):
        drawn = "is its own"
    elif "alike" in random:
        drawn = f"is rank {random['alike']}'s, with which it draws alike"
    lines = [f"{line}; its random state {drawn}."]
    if own := cloned.get("own"):
        lines.append(f"It has its own {_listed(own)} again, as when the last cell ended.")
    if missing := cloned["placeholders"]:
        named = "; ".join(f"{name} ({_short(why)})" for name, why in missing.items())
        lines.append(f"Not cloned to rank {rank}, create again if needed: {named}.")
    return lines


def _short(why: str) -> str:
    line = why.partition("\n")[0]
    return line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]}…"


def _each_once(answers: Mapping[int, Mapping[str, Any]], key: str) -> list[str]:
    said = (line for rank in sorted(answers) for line in answers[rank].get(key) or ())
    return list(dict.fromkeys(said))
