"""Answer while the main thread is busy: state, stacks, and aborting a collective.

Everything here runs on ipykernel's control thread, at any time, even while the main thread is
blocked in C++ (gloo and autograd release the GIL). Nothing here waits for the main thread.
"""

import os
import resource
from typing import TYPE_CHECKING, Any

from nbdist.engine.kernel import fd_reserve, location
from nbdist.shared.text import name_ranks

if TYPE_CHECKING:  # it imports torch
    from nbdist.engine.training.devices import Gpu

gpu: "Gpu | None" = None  # this rank's, where it has one; set when it joins


def state() -> dict[str, Any]:
    """Return what this rank is doing now, for `%dist status` and for recovery.

    Keys: `pid`, `rss_bytes` (resident memory, the highest so far on macOS), `gpu` (its memory, by
    the names of a device's record; {} without one), `step` (optimizer steps of the current or last
    cell), `last` (the newest collective's kind), `group` (generation, re-forms left, backend),
    `snapshot` (None, or the snapshot of sharded state in memory: `step`, `age_s`, `bytes`; or why
    it is `refused`).

    Where it is: `cell` (number of the cell that runs, or None), `doing` ("idle", "computing",
    "waiting", "paused" or "loading data"), `where` (None outside of cells; see
    `location.here.main_thread`),
    `waiting` (None, or the fields of `tap.Waiting` of the main thread's wait), `quiet_s` (for how
    long no byte has come from another rank, or gone; None where that is unknown).

    How far, since the groups were formed: `counts` (collectives by group, and the cell's calls of
    `init_process_group`), `sent` and `received`
    (messages by "group/peer's global rank"), `tagged` (by their tags too). `serves`: a thread
    answers workers' messages, whatever the main thread does.
    """
    from nbdist.engine.averaging import serving
    from nbdist.engine.group import meeting
    from nbdist.engine.group import state as group_state
    from nbdist.engine.group.links import link_stats
    from nbdist.engine.recovery.snapshots import snapshot
    from nbdist.engine.steps import halt
    from nbdist.engine.tap import tap
    from nbdist.engine.training import training

    place = location.here.main_thread()
    # In this order: a collective may wait in the store before it is sent
    # (`collective_check_store`).
    waiting = tap.waiting() or meeting.here.waiting() or group_state.here.waiting_in_store()
    return {
        "pid": os.getpid(),
        "rss_bytes": _resident_bytes(),
        "gpu": {} if gpu is None else gpu.memory(),
        "cell": location.here.running,
        "doing": _doing(
            is_busy=location.here.running is not None or place is not None,
            is_waiting=waiting is not None,
            is_paused=halt.here.is_paused,
            is_loading=training.here.is_loading(),
        ),
        "where": place,
        "waiting": None if waiting is None else waiting.to_wire(),
        "quiet_s": link_stats.quiet_s(),
        "counts": {**tap.counts(), **meeting.here.counts()},
        "sent": tap.sent(),
        "received": tap.received(),
        "tagged": tap.tagged(),
        "serves": serving.here.is_serving(),
        "step": training.here.current_step(),
        "last": tap.last_kind(),
        "group": group_state.here.status(),
        "snapshot": snapshot.here.status(),
    }


def _doing(*, is_busy: bool, is_waiting: bool, is_paused: bool, is_loading: bool) -> str:
    if is_waiting:
        return "waiting"
    if is_paused:
        return "paused"
    if is_loading:
        return "loading data"
    return "computing" if is_busy else "idle"


def cost() -> dict[str, Any]:
    """Return the overhead of monitoring on this rank; see `CostClock.summary`."""
    from nbdist.engine.kernel.cost_clock import clock

    return clock.summary()


def stacks() -> dict[str, str]:
    """Return the stack of each thread of this rank, by the thread's name."""
    from nbdist.engine.kernel.stacks import stacks as of_threads

    return of_threads()


def abort(generation: int) -> int:
    """Free the main thread from a collective, or a pause; returns how many links were cut.

    The group is unusable afterwards, until all ranks have re-formed it.

    Args:
        generation: The one meant; a late order does nothing.
    """
    from nbdist.engine.group import group
    from nbdist.engine.steps import halt

    fd_reserve.here.release()
    cut = group.abort(generation)
    halt.here.end()  # it goes on to its next collective, and fails there
    return cut


def died(ranks: list[int]) -> None:
    """End the checkpoint that is being written, if it waits for ranks that have died.

    A cell that has failed on this rank would wait for it, and so would recovery.
    """
    from nbdist.engine.checkpoint import save

    save.here.give_up(f"{name_ranks(ranks)} died")


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
