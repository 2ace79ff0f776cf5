"""Prove that ranks can never go on: pure, from what the ranks said at two moments.

A rank is *stuck* when it waits for a rank that launches nothing more in this cell (it has
finished, failed or died, or the cell does not run there), or for one that is stuck itself. The
largest set of ranks for which this holds is looked for, so that two ranks that wait for each
other are in it, each because of the other. A rank that computes is never stuck, and neither is one
that waits only for such ranks.

The proof needs all of the same waits at two moments, the second after every answer of the first:
between them all ranks waited at once, and nothing that was read at different times is mixed.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nbdist.client.faults.advice import A_CELL, Advice, AdviceKind, WhatRan
from nbdist.client.faults.rank_state import STORE, Inactive, RankState, Wait, missing_in, waiters
from nbdist.shared.collectives import COLLECTIVES
from nbdist.shared.text import name_ranks

# Here not everyone waits for everyone: a receiver of a broadcast gets its data from one rank, the
# one who waits in the store may wait for any. That peers stand elsewhere proves something only
# when what is under way would have arrived since.
_ARRIVES_IN_S = {one.kind: 3.0 for one in COLLECTIVES.values() if one.root} | {STORE: 1.0}
_BYTES_PER_S = 1e7


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Ranks that can never go on. `waits_for` maps each to the ranks that are to blame.

    `text` says why, naming both sides; `do` says what to do.
    """

    waits_for: Mapping[int, frozenset[int]]
    text: str
    do: Advice

    @property
    def ranks(self) -> tuple[int, ...]:
        """The stuck ranks, ascending."""
        return tuple(sorted(self.waits_for))


@dataclass(frozen=True, slots=True)
class _Need:
    """What one rank waits for.

    `peers` are the ranks not there. `needs_one` is True where any of them could end the wait.
    `trusts_waits` is False where that a peer waits elsewhere proves nothing.
    """

    peers: frozenset[int]
    needs_one: bool
    trusts_waits: bool


def prove(
    before: Mapping[int, RankState],
    after: Mapping[int, RankState],
    gone: Mapping[int, Inactive],
    world: frozenset[int],
    ran: WhatRan = A_CELL,
) -> Deadlock | None:
    """Return the ranks that can never go on, or None.

    Args:
        before: What ranks said, all of it before `after` and at least 0.3 s earlier.
        after: What ranks said; also those of `gone` that live.
        gone: The ranks that launched nothing any more already when `before` was asked for.
        world: All ranks.
        ran: What they run.
    """
    never = frozenset(gone)
    lasting = _lasting(before, after, gone)
    needs = {
        rank: _need(wait, missing_in(rank, after, gone, world)) for rank, wait in lasting.items()
    }
    stuck = frozenset(needs)
    while True:
        held = frozenset(r for r in stuck if _is_held(needs[r], never, stuck))
        if held == stuck:
            break
        stuck = held
    if not stuck:
        return None
    # Who has come to wait since, for one of these, is as stuck.
    waits = {r: doing.wait for r, doing in after.items() if doing.wait and r not in gone}
    needs = {
        rank: _need(wait, missing_in(rank, after, gone, world)) for rank, wait in waits.items()
    }
    while more := {r for r in waits if r not in stuck and _is_held(needs[r], never, stuck)}:
        stuck |= more
    waits = {rank: waits[rank] for rank in sorted(stuck)}
    blame = {r: (needs[r].peers & never) or (needs[r].peers & stuck) for r in waits}
    blamed = frozenset[int]().union(*blame.values())
    reasons = {gone[rank].why for rank in blamed & gone.keys()}
    is_message = all(wait.is_message for wait in waits.values())
    return Deadlock(blame, _tell(waits, blame, gone), _advice(reasons, ran, is_message=is_message))


def _lasting(
    before: Mapping[int, RankState], after: Mapping[int, RankState], gone: Mapping[int, Inactive]
) -> dict[int, Wait]:
    """Return the waits of running ranks that are the same at both moments."""
    found = {}
    for rank, now in after.items():
        then = before.get(rank)
        if rank in gone or then is None or now.wait is None or not now.wait.is_same(then.wait):
            continue
        if now.wait.is_certain and now.counts != then.counts:
            continue
        found[rank] = now.wait
    return found


def _need(wait: Wait, peers: frozenset[int]) -> _Need:
    arrives_in_s = _ARRIVES_IN_S.get(wait.kind)
    has_come = arrives_in_s is None or wait.seconds > arrives_in_s + wait.bytes / _BYTES_PER_S
    return _Need(
        peers,
        needs_one=wait.needs_one,
        trusts_waits=wait.is_certain and has_come,
    )


def _is_held(need: _Need, gone: frozenset[int], stuck: frozenset[int]) -> bool:
    """Return whether a wait never ends when `gone` do nothing more and `stuck` stay stuck."""
    never = gone | stuck if need.trusts_waits else gone
    if need.needs_one:
        return bool(need.peers) and need.peers <= never
    return bool(need.peers & never)


def _tell(
    waits: Mapping[int, Wait], blame: Mapping[int, frozenset[int]], gone: Mapping[int, Inactive]
) -> str:
    """Return the sentences: first who will never come, then who waits for each other."""
    groups: dict[tuple[frozenset[int], str], set[int]] = {}
    for rank in sorted(waits):
        groups.setdefault((blame[rank], str(waits[rank])), set()).add(rank)
    sentences: dict[frozenset[int], list[str]] = {}
    crossed = []
    for (peers, where), ranks in groups.items():
        if peers <= gone.keys():
            it = "it" if len(peers) == 1 else "them"
            sentences.setdefault(peers, []).append(
                f"{waiters(frozenset(ranks))} for {it} in {where}"
            )
        else:
            crossed.append(f"{waiters(frozenset(ranks))} for {name_ranks(peers)} in {where}")
    stated = [f"{_never_come(peers, gone)}; {'; '.join(who)}." for peers, who in sentences.items()]
    if crossed:
        end = "." if stated else ": neither can go on." if len(crossed) < 3 else ": none can go on."
        stated.append("; ".join(crossed) + end)
    return " ".join(stated)


def _never_come(peers: frozenset[int], gone: Mapping[int, Inactive]) -> str:
    by_reason: dict[str, list[int]] = {}
    for peer in sorted(peers):
        same = [p for p in peers if gone[p] == gone[peer]]
        by_reason.setdefault(gone[peer].predicate(len(same)), []).append(peer)
    return ", ".join(f"{name_ranks(ranks)} {said}" for said, ranks in by_reason.items())


def _advice(reasons: Collection[str], ran: WhatRan, *, is_message: bool) -> Advice:
    if "dead" in reasons:
        text = "%dist restart    (new processes), or use a group of the living ranks."
        return Advice(AdviceKind.RESTART, text)
    if "absent" in reasons:
        return Advice(
            AdviceKind.FIX,
            f"run {ran.name} on all ranks of the group, or create a group of those it runs on "
            "(dist.new_group, on all ranks); all ranks kept their variables.",
        )
    what = "make the same calls in the same order on all ranks of a group"
    if is_message:
        what = "match each recv with a send of the same tag, in the order of the calls"
    return Advice(AdviceKind.FIX, f"{what}, and {ran.again(kept=True)}.")
