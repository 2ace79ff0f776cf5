"""What a trial does beside training: groups, messages, values, and ranks that come and go."""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from tests.random import cells, sentences
from tests.random.acts import Message, Push, Sum
from tests.random.calls import Lost
from tests.random.expected import must_fail, within
from tests.random.held import OPTIMIZER_REFUSED
from tests.random.strikes import pid_of
from tests.random.world import World


def sum_over(world: World, act: Sum) -> None:
    """Sum over a group, or all ranks, while a fault may strike."""
    group = world.groups.get(act.group) if act.group else None
    if act.group and group is None:
        return
    everyone = tuple(range(world.n))
    members = group.ranks if group else everyone
    fault = within(act.fault, members, world.n)
    world.calls.row.layout = "group" if group else "all ranks"
    world.calls.row.fault = fault.kind
    ran = world.calls.run(cells.reduce(act.group, members, fault, world.calls.flag), fault)
    fired = world.calls.has_fired()
    if ran.error is None and ran.result is not None:
        total = float(sum(2**rank for rank in members))
        right = [total if rank in members else 2.0**rank for rank in everyone]
        if ran.result.value_list != right and not (fired and fault.kind == "leaves early"):
            world.calls.find("a wrong sum", f"{ran.result.value_list}, not {right}")
        if fired and must_fail(fault) and len(members) > 1:
            world.calls.find("an untold fault", f"{fault} did not fail the cell")
    elif group is not None and group.trouble:
        world.calls.row.outcome = "refused"
    elif fired:
        world.calls.row.outcome = "failed"
    else:
        world.calls.find("an error without a fault", ran.text)
    if fired:
        for cause in sentences.missing_cause(world.calls.text, fault):
            world.calls.find("an untold cause", f"{cause} is not in: {world.calls.text}")
    for text in sentences.false_loss(world.calls.text, set()):
        world.calls.find("a false sentence", text)


def message(world: World, act: Message) -> None:
    """Send numbers from one rank to another."""
    if max(act.sender, act.receiver) >= world.n:
        return
    fits = act.sent == act.room
    world.calls.row.fault = "none" if fits else "a message of another size"
    ran = world.calls.run(cells.message(act.sender, act.receiver, act.sent, act.room))
    right = [float(act.sent) if rank == act.receiver else 0.0 for rank in range(world.n)]
    if not fits:
        world.calls.row.outcome = "failed"
        if ran.error is None:
            world.calls.find("an untold fault", f"{act} did not fail the cell")
    elif ran.error is not None or ran.result is None:
        world.calls.find("an error without a fault", ran.text)
    elif ran.result.value_list != right:
        world.calls.find("a wrong value", f"{ran.result.value_list}, not {right}")


def push(world: World, act: Push) -> None:
    """Push a value to all ranks, and pull it."""
    pulled: list[Any] = []

    def there_and_back() -> None:
        world.session.push({act.name: act.value})
        pulled.extend(world.session.pull(act.name))

    world.call_well(there_and_back)
    if pulled != [act.value] * world.n:
        world.calls.find("a wrong value", f"pushed {act.value}, pulled {pulled}")
    set_values(world, act.name, [act.value] * world.n)


def set_values(world: World, name: str, values: Sequence[int]) -> None:
    """Note what each rank holds under a name now."""
    world.held.variables[name] = {rank: {value} for rank, value in enumerate(values)}


def idle(world: World, ranks: Sequence[int]) -> None:
    """Kill ranks while no cell runs; the next cell mends."""
    world.calls.row.fault = f"idle, {len(ranks)} killed" if len(ranks) > 1 else "idle, killed"
    for rank in ranks:
        os.kill(pid_of(world.session, rank), signal.SIGKILL)
    deadline = time.monotonic() + 30
    while set(world.session._cluster.dead()) != set(ranks) and time.monotonic() < deadline:
        time.sleep(0.005)
    world.calls.run("pass")  # mends


def restart(world: World, ranks: Sequence[int]) -> None:
    """Give living ranks new processes."""
    if ranks and len(ranks) < world.n:
        world.calls.row.fault = "restart"
        world.call_well(lambda: world.session.restart(",".join(map(str, ranks))))


def scale(world: World, n: int) -> None:
    """Change the number of ranks."""
    if n == world.n:
        return
    world.calls.row.fault = f"scale {'up' if n > world.n else 'down'}"
    if world.call_well(lambda: world.session.scale(n)).error is not None:
        raise Lost
    world.held.leave(range(n, world.n))
    world.n = n
    for shadow in world.held.shadows():
        shadow.members = tuple(range(n))
        # A new optimizer does not help any more.
        if shadow.model.layout != "ddp" and shadow.trouble in ("", OPTIMIZER_REFUSED):
            shadow.trouble = "scaled"
    for group in world.groups.values():
        group.trouble = "scaled"
        group.ranks = tuple(r for r in group.ranks if r < n) or (0,)
