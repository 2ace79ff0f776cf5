"""Give replacement ranks what peers have kept of their predecessors.

    sync    ask who keeps what (`kept`), decide, go back together; have objects travel (`expect`)
    clone   the objects of a unit come from a living rank, without the contents of what is cut
    restore the peer sends the contents, and the replacement rank puts them in

Main thread of every rank, at the same time.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbdist.engine.group import rendezvous
from nbdist.engine.recovery import send_tensors, wrapped_models
from nbdist.engine.recovery.clone import shards
from nbdist.engine.recovery.decide import Decision, Kept
from nbdist.engine.recovery.snapshots import peers, snapshot
from nbdist.engine.steps import step_state
from nbdist.shared.errors import ClusterError

TIMEOUT_S = rendezvous.FORM_TIMEOUT_S


def kept(replacements: Iterable[int]) -> dict[int, Kept]:
    """Return what lies in living ranks' memory of those that died. All ranks.

    Raises:
        ClusterError: A rank did not answer in time.
    """
    mine = json.dumps(peers.here.held())
    heard = rendezvous.exchange("kept for others", mine, TIMEOUT_S)
    found: dict[int, Kept] = {}
    for holder, text in sorted(heard.items()):
        for rank, boxes in json.loads(text).items():
            if int(rank) in replacements:
                there = {
                    box: [(tuple(steps), age) for steps, age in held] for box, held in boxes.items()
                }
                one = Kept(holder, there)
                # After a move of hosts an older peer may hold older ones.
                found[int(rank)] = min(found.get(int(rank), one), one, key=_age)
    return found


def _age(kept: Kept) -> float:
    """Return the age of the newest snapshot, in s."""
    return min((age for held in kept.snapshots.values() for _, age in held), default=math.inf)


def expect(replacement: int, unit: wrapped_models.Unit) -> None:
    """Have a unit's objects travel to a new rank, which gets the contents from a peer."""
    states = [
        value
        for optimizer in unit.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    shards.here.expect(
        replacement, [*unit.parameters, *unit.fixed, *unit.modules, *unit.optimizers, *states]
    )
    step_state.here().restored.update(unit.optimizers)


def expect_others(decisions: Iterable[Decision]) -> None:
    """Know, on a new rank that has just got its copies, which other new ranks get their parts."""
    units = {unit.identity: unit for unit in wrapped_models.find()}
    for decision in decisions:
        for replacement, _ in decision.given:
            if decision.identity in units:
                expect(replacement, units[decision.identity])


def missing(decisions: Iterable[Decision], replacements: Iterable[int]) -> dict[str, list[int]]:
    """Return, by unit, the new ranks to which its objects did not come. All ranks, after the clone.

    A name that holds something else that is lost is given up, and with it what only it holds.

    Raises:
        ClusterError: A rank did not answer in time.
    """
    given = {one.identity: [rank for rank, _ in one.given] for one in decisions if one.given}
    if not given:
        return {}
    units = {unit.identity for unit in wrapped_models.find()}
    heard = rendezvous.exchange("units that came", json.dumps(sorted(units)), TIMEOUT_S)
    came = {rank: json.loads(heard[rank]) for rank in replacements}
    found = {name: [r for r in ranks if name not in came[r]] for name, ranks in given.items()}
    return {name: ranks for name, ranks in found.items() if ranks}


def restore(decisions: Sequence[Decision]) -> bool:
    """Send and put in what peers have kept, after the clone. All ranks.

    Args:
        decisions: Those of units that have come to all new ranks.

    Returns:
        Whether this rank got something.

    Raises:
        ClusterError: What was kept does not fit the unit that came.
    """
    here, has_got = dist.get_rank(), False
    for decision in decisions:
        for replacement, holder in decision.given:
            if here == holder:
                saved, tensors = peers.here.get(replacement, decision.identity, decision.steps)
                fixed = peers.here.get_fixed(replacement, decision.identity, saved)
                send_tensors.send((saved, len(fixed)), [*fixed, *tensors], replacement)
            elif here == replacement:
                (saved, count), tensors = send_tensors.receive(holder)
                _put_in(decision, saved, tensors[:count], tensors[count:])
                has_got = True
    shards.here.expect_nothing()
    return has_got


@torch.no_grad()
def _put_in(
    decision: Decision, saved: Any, fixed: list[torch.Tensor], tensors: list[torch.Tensor]
) -> None:
    unit = next(u for u in wrapped_models.find() if u.identity == decision.identity)
    try:
        for live, tensor in zip(unit.fixed, fixed, strict=True):
            wrapped_models.local(live).detach().copy_(tensor)
        mark = snapshot.here.install(unit, saved, tensors)
    except (LookupError, RuntimeError, ValueError) as error:
        raise ClusterError(
            "A replacement rank could not be given its part of a model.",
            why=str(error),
            do="build the model again, or load a checkpoint into it on every rank",
        ) from error
    unit.settle(decision.parts, decision.steps)
    step_state.here().go_on_from(mark)
