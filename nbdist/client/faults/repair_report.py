"""What a repair has done, in sentences, from what each rank answered. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist.shared.text import begin_with_ranks, counted, name_ranks

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
    stay, where that is why the cluster is `broken`. `has_fewer`: there are fewer ranks now, as
    no host takes the others. `is_refused`: a model is there without its contents, for a checkpoint
    to be restored into it. `is_half`: of a step that was made a part is not, as a line says.
    """

    lines: tuple[str, ...] = ()
    replaced: tuple[int, ...] = ()
    is_whole: bool = True
    is_cloned: bool = True
    irreplaceable: tuple[int, ...] = ()
    has_fewer: bool = False
    is_refused: bool = False
    is_half: bool = False


def describe(
    answers: Mapping[int, Mapping[str, Any]], pids: Mapping[int, int], *, is_news: bool = True
) -> Repaired:
    """Return what a recovery did, in sentences.

    Args:
        answers: What each rank answered, see `engine/recovery/recovery.py`.
        pids: The new ranks and their processes.
        is_news: Whether to say that the group was re-created.
    """
    lines = describe_replacements(answers, pids, replaced=True)
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
    is_refused = any(answers[rank].get("is_refused") for rank in pids)
    return Repaired(
        tuple(lines),
        tuple(sorted(pids)),
        is_whole,
        is_cloned,
        is_refused=is_refused,
        is_half=any(answer.get("is_half") for answer in answers.values()),
    )


def describe_replacements(
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
    inexact = [line for of_rank in cloned.values() for line in of_rank.get("inexact", ())]
    # Of ranks that come beside others, the layouts that have no part for them are named by `scale`.
    lost = _lost(cloned) if replaced else []
    return [*lines, *lost, *dict.fromkeys(inexact), *_differing(cloned)]


def _lost(cloned: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return which sharded models cannot be used any more, in one sentence for all new ranks."""
    names = list(dict.fromkeys(name for of_rank in cloned.values() for name in of_rank["lost"]))
    if not names:
        return []
    held = [rank for rank, of_rank in cloned.items() if of_rank["lost"]]
    what = f"The shards of {', '.join(names)} that {name_ranks(held)} held are lost"
    them = "it" if len(names) == 1 else "them"
    # A new rank has placeholders of these, into which nothing can be restored.
    then = f"nbdist.restore() then brings back what a checkpoint has of {them}"
    return [f"{what}: build {them} again; {then}."]


def _differing(cloned: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return what new ranks have of another rank's that was most likely made from its number."""
    groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for rank, of_rank in cloned.items():
        if names := of_rank.get("differ"):
            groups.setdefault((of_rank["source"], tuple(names)), []).append(rank)
    return [
        f"These differ between ranks, and {name_ranks(ranks)} "
        f"{'has' if len(ranks) == 1 else 'have'} rank {source}'s: {_listed(names)}. "
        f"Create them again there: %%distributed -r {','.join(map(str, ranks))}."
        for (source, names), ranks in groups.items()
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
        drawn = f"is rank {random['alike']}'s, with which it draws the same numbers"
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
