"""Run a trial in a fresh session, and compare what every rank holds with the shadow after each act.

What may be lost must be said; then the shadow follows what was said. Everything else that differs
is a finding. Main thread, which a trial interrupts.
"""

from pathlib import Path

from nbdist import Session
from tests.random import drive_models, drive_ranks, steps
from tests.random.acts import (
    Act,
    Drop,
    Group,
    Idle,
    Keep,
    Make,
    Message,
    Push,
    Restart,
    Scale,
    Set,
    Sum,
    Train,
    Trial,
)
from tests.random.calls import Calls, Driven, Lost
from tests.random.world import World


def drive(trial: Trial, session: Session, folder: Path) -> Driven:
    """Run all acts of a trial in a session that has just begun."""
    world = World(trial.n, Calls(session, folder))
    try:
        for act in trial.acts:
            perform(world, act)
        finish(world)
        steps.train(world, trial.seed)
    except Lost:
        pass
    return world.driven


def perform(world: World, act: Act) -> None:
    """Do one act, look at all ranks, and compare."""
    world.begin(act)
    match act:
        case Make():
            drive_models.make(world, act.models)
        case Train():
            drive_models.train(world, act)
        case Keep():
            drive_models.keep(world, act)
        case Drop():
            drive_models.drop(world, act)
        case Group():
            world.make_group(act.name, act.ranks)
        case Sum():
            drive_ranks.sum_over(world, act)
        case Message():
            drive_ranks.message(world, act)
        case Set():
            world.calls.ran_well(f"{act.name} = {act.factor} * rank")
            drive_ranks.set_values(world, act.name, [act.factor * r for r in range(world.n)])
        case Push():
            drive_ranks.push(world, act)
        case Idle():
            ranks = [rank for rank in act.ranks if rank < world.n]
            drive_ranks.idle(world, ranks[: world.n - 1])
        case Restart():
            drive_ranks.restart(world, [rank for rank in act.ranks if rank < world.n])
        case Scale():
            drive_ranks.scale(world, act.n)
    world.look()


def finish(world: World) -> None:
    """Train whatever still can be, and use each group, with no fault: all must be right."""
    for name in list(world.held.names):
        if world.held.usable(name) is not None:
            perform(world, Train((name,), 2))
    for group in (None, *world.groups):
        perform(world, Sum(group))
