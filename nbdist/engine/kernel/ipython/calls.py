"""The calls that the notebook may make on a rank, by name.

`MAIN` runs on the main thread, in order with the cells. `ANY_TIME` runs on ipykernel's control
thread, at once, also while the main thread is blocked in a collective; such a function must
neither wait for the main thread nor touch a process group except to abort it.

`CELLS` run as the code of a cell does: they make collectives, may be interrupted, and free the
other ranks when they fail. Each takes the names of the rank's cells, as `names`.

A value is the function's place, `module:function` or `module:object.method`, resolved at its first
use, so that this table costs no import. Functions take and return JSON-like values; those in
`WITH_BUFFERS` take `buffers` as well and return `(value, buffers)`.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

MAIN = {
    "boot.answer": "nbdist.engine.rank.boot:answer",
    "boot.join": "nbdist.engine.rank.boot:join",
    "group.leave": "nbdist.engine.rank.boot:leave",
    "group.recover": "nbdist.engine.rank.boot:recover",
    "layout.fitting": "nbdist.engine.layout.parallelize:here.fitting",
    "profile.read": "nbdist.engine.training.torch_profile:here.read",
    "records.resend": "nbdist.engine.rank.boot:resend",
    "transfer.push": "nbdist.engine.rank.transfer:push",
    "transfer.pull": "nbdist.engine.rank.transfer:pull",
}

ANY_TIME = {
    "boot.missed": "nbdist.engine.rank.boot:missed",
    "clock.read": "nbdist.shared.clock:read",
    "control.state": "nbdist.engine.rank.control:state",
    "control.cost": "nbdist.engine.rank.control:cost",
    "control.stacks": "nbdist.engine.rank.control:stacks",
    "control.abort": "nbdist.engine.rank.control:abort",
    "control.go_on": "nbdist.engine.group.meeting:here.end_wait",
    "control.died": "nbdist.engine.rank.control:died",
    "control.interrupt": "nbdist.engine.kernel.interrupts:here.order",
    "control.interrupt_children": "nbdist.engine.kernel.cleanup:interrupt_children",
    "halt.hold": "nbdist.engine.steps.halt:here.hold",
    "halt.go_on_to": "nbdist.engine.steps.halt:here.go_on_to",
    "halt.look": "nbdist.engine.steps.halt:here.look",
    "halt.act": "nbdist.engine.steps.halt:here.act",
    "halt.end": "nbdist.engine.steps.halt:here.end",
    "leaving.hold": "nbdist.engine.checkpoint.automatic:leaving.hold",
    "leaving.go_on_to": "nbdist.engine.checkpoint.automatic:leaving.go_on_to",
    "leaving.outcome": "nbdist.engine.checkpoint.automatic:leaving.outcome",
    "names.members": "nbdist.engine.rank.names:members",
    "names.describe": "nbdist.engine.rank.names:describe",
    "layout.words": "nbdist.engine.layout.plan.mesh:words",
    "chaos.fail": "nbdist.engine.kernel.chaos:here.fail",
    "chaos.interrupt": "nbdist.engine.kernel.chaos:here.interrupt",
    "records.resend": "nbdist.engine.rank.boot:resend",
}

CELLS = {
    "layout.verify": "nbdist.engine.layout.verify_magic:verify",
    "layout.traffic": "nbdist.engine.layout.verify_magic:traffic",
    "layout.compare": "nbdist.engine.layout.compare_layouts:compare",
    "checks.replay": "nbdist.engine.checks.replay:replay",
    "group.probe": "nbdist.engine.group.links.probe:measure",
    "training.compute_rate": "nbdist.engine.training.compute_rate:measure",
}

CALL = "_nbdist_call"  # in the namespace of cells while one of these runs

WITH_BUFFERS = {"profile.read", "transfer.push", "transfer.pull"}
INTERRUPTIBLE = {"transfer.push", "transfer.pull"}  # as a cell is; others are never cut off


def resolve(name: str, *, busy: bool) -> Callable[..., Any]:
    """Return the function behind `name`.

    Args:
        name: A key of `MAIN`, or of `ANY_TIME` when `busy`.
        busy: The request came by the control channel.

    Raises:
        KeyError: No such call on this channel.
    """
    return _function((ANY_TIME if busy else MAIN)[name])


def source_of(name: str, arguments: Mapping[str, Any], names: dict[str, Any]) -> str:
    """Return code that runs a row of `CELLS` once, as a cell that IPython runs."""
    names[CALL] = lambda: _function(CELLS[name])(names=names, **arguments)
    return f"{CALL}()"


def _function(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    found: Callable[..., Any] = attrgetter(name)(import_module(module))
    return found
