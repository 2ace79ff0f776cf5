"""Choose the buckets of DDP's reducers after a fault: those of the next step.

A reducer begins with the buckets it was made with. In the forward after its first whole backward it
rebuilds them, once: from then on gradients are summed in another order. A fault in the middle of
this leaves ranks with different ones, and gloo ends the process when their sizes differ. So
ranks exchange what they have, and the rule is: *every rank continues with the buckets that an
undisturbed run has in the next step.*

- No step has ended yet: those the reducer began with.
- Otherwise the rebuilt ones; where no rank has any, those it would build in the next forward.
- Ranks whose reducers were made for different parameters, for some had come to a forward after a
  change of what is trained and some had not, rebuild them in their next forward.

A new rank's reducer is made with its source's (`clone/torch_rebuild.py`). All of them are then in
one phase: no backward recorded, and the buckets rebuilt after the next one, on all ranks.

A reducer with a static graph also learns in its first backward how often each parameter is used. A
first backward that was lost would be counted twice: such a reducer is re-created.

Threads: the main one, but `at_boundary`, which an optimizer may call from another.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat import torch_reducers
from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.compat.torch_reducers import Buckets
from nbdist.engine.group import identity

# From a topic and this rank's text to each rank's text.
Exchange = Callable[[str, str], dict[int, str]]

_MOST = 2  # steps are counted up to here: nothing changes in a reducer later


@dataclass(frozen=True, slots=True)
class Fact:
    """One rank's report of its reducer.

    Attributes:
        ended: Steps that have ended since it was made, up to two.
        phase: "rebuilt" where it has rebuilt its buckets since the last repair, "first" where that
            is still to come, "never" where it never does.
        is_static: Whether it has a static graph.
        made_for: The parameters that it was made for and that are trained now; see
            `torch_reducers.made_for`.
    """

    ended: int
    phase: str
    is_static: bool
    made_for: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """Buckets that one rank can name: "laid", "to come" in the next forward, or its "own"."""

    kind: str
    buckets: Buckets


_BEST_FIRST = ("laid", "to come", "own")


class ReducerBuckets:
    """The living reducers' buckets, as far as they are known."""

    def __init__(self) -> None:
        self._laid: WeakKeyDictionary[Any, Buckets] = WeakKeyDictionary()  # by reducer
        # By reducer: steps since it was made.
        self._ended: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def at_boundary(self, ddps: Iterable[DistributedDataParallel]) -> bool:
        """Count the steps that these modules' reducers have ended. At the end of an optimizer step.

        Returns:
            Whether all are counted, as long as no reducer is re-created.
        """
        are_counted = True
        for ddp in ddps:
            if not torch_reducers.has_reducer(ddp):
                continue
            ended = self._ended.get(ddp.reducer, 0)
            if ended < _MOST and torch_reducers.has_gradients(ddp):
                ended = self._ended[ddp.reducer] = ended + 1
            are_counted = are_counted and ended >= _MOST
        return are_counted

    def settle(self, ddps: Iterable[DistributedDataParallel], exchange: Exchange) -> set[int]:
        """Bring the modules' reducers to their state before the next step. All ranks.

        Args:
            ddps: This rank's modules, in the order of making.
            exchange: Called once or twice, equally often on every rank.

        Returns:
            The `id` of those whose reducers were re-created, the same ones on all ranks.
        """
        ddps = _reducing(ddps)
        named = _named(ddps)
        mine = {key: asdict(self._fact(ddp)) for key, ddp in named.items()}
        heard = _exchange(exchange, "reducers", mine)
        facts = {key: [Fact(**fact) for fact in by_rank.values()] for key, by_rank in heard.items()}
        plans = {key: plan(of_key) for key, of_key in facts.items()}
        claimed: dict[str, dict[int, Any]] = {}
        if "agree" in plans.values():
            own = {
                key: [asdict(claim) for claim in self._claims(ddp)]
                for key, ddp in named.items()
                if plans[key] == "agree"
            }
            claimed = _exchange(exchange, "buckets", own)
        keys = {id(ddp): key for key, ddp in named.items()}
        remade = set()
        for ddp in ddps:
            key = keys.get(id(ddp), "")
            chosen = plans.get(key, "reset")  # without a group it cannot be trained
            buckets = torch_reducers.began_with(ddp)
            if chosen == "agree":
                members = torch_groups.ranks_of(ddp.process_group)
                its = claimed[key]
                claims = [Claim(**claim) for rank in members for claim in its.get(rank, ())]
                best = agreed(claims)
                buckets = None if best is None else best.buckets
                if best is not None and best.kind == "own" and not is_learning(facts[key]):
                    chosen = "reset"
            if chosen in ("reset", "in the next forward"):
                torch_reducers.reset_ddp(ddp)
                if chosen != "reset":
                    torch_reducers.forget_trained(ddp)
            else:
                torch_reducers.remake_reducer(ddp, buckets)
                remade.add(id(ddp))
        return remade

    def order_of(self, ddp: DistributedDataParallel) -> Buckets | None:
        """Return the buckets by which gradients are summed from the next step on; None: not known.

        Rebuilt ones stay, and are looked up once: it takes memory for all gradients.
        """
        if not torch_reducers.has_reducer(ddp):
            return None
        known = self._laid.get(ddp.reducer)
        if known is None:
            claims = self._claims(ddp)
            if not claims:
                return None
            known = claims[0].buckets
            if claims[0].kind == "laid":
                self._laid[ddp.reducer] = known
        return known

    def _fact(self, ddp: DistributedDataParallel) -> Fact:
        phase = "rebuilt" if torch_reducers.has_rebuilt_buckets(ddp) else "first"
        if not torch_reducers.lays_anew(ddp):
            phase = "never"
        ended, made_for = self._ended.get(ddp.reducer, 0), torch_reducers.made_for(ddp)
        return Fact(ended, phase, bool(ddp.static_graph), made_for)

    def _claims(self, ddp: DistributedDataParallel) -> list[Claim]:
        """Return this rank's best claim of a module's buckets, if any."""
        if torch_reducers.has_rebuilt_buckets(ddp):
            kind, buckets = "laid", torch_reducers.buckets_of(ddp)
        else:
            # With a static graph the first backward does not show the order. What an unfinished
            # step shows is lost with it.
            is_known = self._ended.get(ddp.reducer, 0) >= (2 if ddp.static_graph else 1)
            kind, buckets = "to come", torch_reducers.buckets_to_come(ddp) if is_known else None
            if buckets is None:
                kind, buckets = "own", torch_reducers.buckets_of(ddp)
        return [] if buckets is None else [Claim(kind, buckets)]


def continue_with(ddp: DistributedDataParallel, buckets: Buckets) -> None:
    """Sum gradients in the order of `order_of`, of another process. On all ranks; no collective."""
    torch_reducers.remake_reducer(ddp, buckets)


def plan(facts: list[Fact]) -> str:
    """Return what ranks with these facts of a module do with its reducers.

    Returns:
        "reset": the buckets stay. "begin again": those it began with. "agree": ranks exchange their
        buckets, and take the same ones. "in the next forward": they are rebuilt there.
    """
    if len({fact.made_for for fact in facts}) > 1:
        return "in the next forward"
    phases = {fact.phase for fact in facts}
    if not any(fact.ended for fact in facts):
        has_begun = "rebuilt" in phases or any(fact.is_static for fact in facts)
        return "begin again" if has_begun else "reset"
    is_settled = len(phases) == 1 and phases != {"first"}
    return "reset" if is_settled and not is_learning(facts) else "agree"


def is_learning(facts: list[Fact]) -> bool:
    """Return whether a rank's reducer has not ended the step in which it learns a static graph."""
    return any(fact.is_static and not fact.ended for fact in facts)


def agreed(claims: Iterable[Claim]) -> Claim | None:
    """Return the claim whose buckets are used, of the claims in the order of the group.

    torch also takes those of the group's first rank. Where the best are a rank's own, all
    have the same: none of them has rebuilt any since the last repair. None where no rank can name
    any, for parameters have been frozen since: then all take the constructor's.
    """
    return min(claims, key=lambda claim: _BEST_FIRST.index(claim.kind), default=None)


def _reducing(ddps: Iterable[DistributedDataParallel]) -> list[DistributedDataParallel]:
    return [ddp for ddp in ddps if torch_reducers.has_reducer(ddp)]


def _exchange(exchange: Exchange, topic: str, mine: dict[str, Any]) -> dict[str, dict[int, Any]]:
    """Exchange values by module with all ranks; return, by module, each rank's value."""
    heard = {rank: json.loads(text) for rank, text in exchange(topic, json.dumps(mine)).items()}
    keys = dict.fromkeys(key for of in heard.values() for key in of)
    return {key: {rank: of[key] for rank, of in heard.items() if key in of} for key in keys}


def _named(ddps: Iterable[DistributedDataParallel]) -> dict[str, DistributedDataParallel]:
    """Return the modules by the names that all ranks of their groups have for them."""
    return {
        name: ddp
        for ddp in ddps
        # The groups of others are gone: they cannot be trained.
        if torch_groups.ranks_of(ddp.process_group) and (name := identity.here.of(ddp))
    }


here = ReducerBuckets()
