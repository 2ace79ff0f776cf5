"""The process group of this rank: join it, leave it, form it again.

A fault on one rank leaves its peers waiting inside C++. `abort` frees them, from any thread; then
every rank, idle again, calls `reform`, and the same `ProcessGroup` objects continue with new
backends: modules, meshes and optimizers that hold a group never notice. A killed rank's successor
calls `join` with the generation that the survivors `reform`, and makes the groups that it belongs
to.

Generations count from 0, the first `join`; none is ever used twice, even one that failed. All that
a generation writes in the store lies under `nbdist/GENERATION`, so that nothing of a broken one
can be mistaken for news.

Threads: everything here runs on the main thread, but `abort` and `was_released`, which any thread
may call at any moment.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from nbdist.engine.compat import torch_hooks, torch_init, torch_live, torch_modules
from nbdist.engine.compat.groups import torch_backends, torch_groups
from nbdist.engine.compat.groups.group_spec import GroupSpec
from nbdist.engine.compat.groups.torch_groups import PrefixStore, TCPStore
from nbdist.engine.group import (
    ddp_hook_state,
    gloo_setup,
    group_record,
    identity,
    new_backends,
    rendezvous,
    sockets,
    state,
)
from nbdist.engine.group.links import throttle
from nbdist.engine.group.rendezvous import FORM_TIMEOUT_S
from nbdist.engine.group.state import GLOO_THREADS, GroupState
from nbdist.engine.steps import guard, step_state
from nbdist.engine.tap import counters, in_flight
from nbdist.engine.tap.interruptible_store import PatientStore, ReleasedError
from nbdist.shared import error_text
from nbdist.shared.errors import ClusterError
from nbdist.shared.options import ClusterOptions
from nbdist.shared.placement import RankPlacement
from nbdist.shared.processes import name_servers

_STORE_TIMEOUT = timedelta(seconds=60)  # it listens before any rank is started
_RESTART = "%dist restart    (new processes; what the ranks hold is lost)"
_ABORTED = (
    "this rank aborted its collectives, because another rank failed or the cell was interrupted"
)


def join(
    rank: int,
    options: ClusterOptions,
    place: RankPlacement,
    store_port: int,
    *,
    generation: int = 0,
    first_group: int = 0,
    store_host: str = "",
    store_prefix: str = "",
    recovers: bool = True,
) -> torch.device:
    """Become `rank` of the default process group. On the main thread; again only after `leave`.

    Args:
        rank: This process's rank.
        options: The same on all ranks.
        place: This rank's. gloo listens on its address, and on nothing else.
        store_port: Where the store listens (`host/store.py`), at the address in `options`.
        generation: 0 in a new cluster; for a rank that replaces a killed one, the generation
            which the survivors `reform` at the same time.
        first_group: The default group's number, from which torch makes its name. All ranks that
            join with a generation give the same, higher than any group had before a `leave`.
        store_host: Where the store is, if not at the address in `options`.
        store_prefix: The prefix of all keys, in a store that others have used before.
        recovers: Whether faults are recovered from; otherwise torch ends the process at one.

    Returns:
        The rank's device; a GPU is the process's current one.

    Raises:
        ClusterError: The other ranks did not arrive within FORM_TIMEOUT_S.
        StartError: The host has too few GPUs.
    """
    before = state.here.place()
    if before is not None:
        raise ClusterError(f"This process already is rank {before.rank}.", do=_RESTART)
    address = store_host or options.address
    gloo_setup.environment(address, store_port, place.address, recovers=recovers)
    rank_device = gloo_setup.take_device(options, place)
    with name_servers.waiting_briefly():
        client = TCPStore(address, store_port, None, False, timeout=_STORE_TIMEOUT)
    if store_prefix:  # which has the same methods
        client = cast(TCPStore, PrefixStore(store_prefix, client))
    device, gloo_address = gloo_setup.gloo_device(place.address)
    here = GroupState(
        rank,
        options.n,
        options.backend,
        options.timeout,
        client,
        PatientStore(client),
        device,
        gloo_address,
        generation,
        place.host,
        place.leads,
        options.check,
    )
    _watch_torch(here)
    state.here.enter(here)
    here.form_limit = timedelta(seconds=FORM_TIMEOUT_S)
    try:
        _make_groups(here, first_group)
    except BaseException:
        state.here.leave()
        raise
    finally:
        here.form_limit = None
        rendezvous.stop_sharing(here)
    return rank_device


def _watch_torch(here: GroupState) -> None:
    """Have torch make its groups as this rank does, and note what is made of them."""
    torch_backends.use_gloo_device(
        here.device,
        GLOO_THREADS,
        lambda wanted: min(wanted, here.form_limit or wanted),
        throttle.here.apply,
    )
    torch_init.answer_env_rendezvous(lambda asked: gloo_setup.answer_env(here, asked))
    torch_init.take_as_done(lambda asked: gloo_setup.agree(here, asked))
    torch_groups.watch_names()
    torch_groups.watch_destroy(new_backends.here.end)
    torch_live.here.watch(_note_made)
    ddp_hook_state.here.watch()
    torch_modules.make_replicate_again()


def _make_groups(here: GroupState, first_group: int) -> None:
    """Make the default group, and those in which the predecessor of this rank was."""
    torch_groups.set_group_count(first_group)
    everyone, spec = tuple(range(here.world_size)), GroupSpec(here.backend, here.timeout_s, "")
    record = group_record.read(here.client, here.rank) if here.generation else None
    if record is not None and int(record.default) < first_group:
        record = None  # of groups that all ranks have left since
    default, groups = (record.default, record.groups) if record else (str(first_group), {})
    known = {(default, everyone): spec} | groups
    plan = rendezvous.meet(here, known, FORM_TIMEOUT_S, default=default, is_new=True)
    _make_default(here, plan.default)
    for (name, ranks), spec in plan.groups.items():
        if name != plan.default and here.rank in ranks:
            torch_groups.make_group(name, ranks, spec, here.place())
    torch_groups.set_group_count(max(plan.group_count, torch_groups.group_count()))


def _note_made(made: Any) -> None:
    identity.here.note(made)
    step_state.here().note_made(made)
    guard.here.evidence.note_made(made)


def _make_default(here: GroupState, name: str) -> None:
    # torch names the first group it makes by a number.
    torch_groups.set_group_count(int(name))
    dist.init_process_group(
        here.backend,
        store=here.place(),
        rank=here.rank,
        world_size=here.world_size,
        timeout=timedelta(seconds=here.timeout_s),
    )


def leave() -> int:
    """Leave every group, so that the ranks can `join` as another number. Main threads idle.

    A rank that is in no group leaves none.

    Returns:
        The first number that no group has used as its name.
    """
    made = torch_groups.group_count()
    _destroy()
    here = state.here.leave()
    if here is not None:
        for number in here.held:
            os.close(number)
        if here.offered is not None:
            here.offered.close()
    counters.begin_generation(None)
    return made


def _destroy() -> None:
    """Destroy all groups of this process, and refuse further calls of them."""
    groups = torch_groups.live_groups()
    if dist.is_initialized():
        torch_groups.destroy_groups()
    counters.close(live.group for live in groups)


def abort(generation: int | None = None) -> int:
    """Release every peer: all waits for one raise within milliseconds. Any thread.

    The main thread, if it waits in a collective or in the store, gets an error for which
    `was_released` is true. If it does not, its next collective fails at once. Groups stay unusable
    until `reform`. Repeating it is harmless.

    Args:
        generation: The one meant. A late order, when a newer one has been formed,
            does nothing. None means the present one.

    Returns:
        Number of backends that were broken.
    """
    here = state.here.place()
    if here is None or (generation is not None and generation != here.generation):
        return 0
    here.aborted = True
    here.store.release(_ABORTED)
    return _cut(here)


def _cut(here: GroupState) -> int:
    """Break every pair and communicator of this process. Any thread; returns as `abort` does."""
    # A peer must not see our sockets close before it has released them itself: a gloo pair whose
    # write fails loses the operation that its event loop has just taken from the queue, and a wait
    # for it lasts the group's whole timeout (one of ten faults in DDP's backward).
    here.held += sockets.hold(here.address, set(here.peers.values()), here.held)
    count = 0
    for live in torch_groups.live_groups():
        try:
            backends = torch_backends.backends_of(live.group)
        except RuntimeError:
            continue  # between two backends: `reform` replaces them, and will see `aborted`
        for _, backend in backends:
            count += torch_backends.break_backend(backend)
        if all(torch_hooks.is_gloo(backend) for _, backend in backends):
            in_flight.end_receives_from_anyone(live.group)
    # Then pairs of no group yet, and of groups made by hand. Not earlier: pairs that end by
    # themselves, one after the other, lose operations too.
    sockets.end_reading(here.held)
    return count


def reform(generation: int, timeout_s: float = FORM_TIMEOUT_S) -> dict[str, Any]:
    """Give every group a new backend. All ranks at the same time, main threads idle.

    Where the program has destroyed the default group of a rank, all ranks make a new one, and
    the old groups no longer exist.

    Args:
        generation: Higher than any before, the same on all ranks.
        timeout_s: Longest wait for the other ranks.

    Returns:
        `generation`, `groups` (how many were re-formed), `stale` (names of those that could not
        be), `reforms_left`, `is_anew` (a new default group was made).

    Raises:
        ClusterError: A rank did not arrive in time, or no re-form is left.
        ReleasedError: `abort` was called meanwhile. Either way the groups are unusable until the
            next `reform`, with a higher generation.
    """
    here = state.here.member()
    _require_new(generation, here)
    _enter(generation, here)
    here.form_limit = timedelta(seconds=timeout_s)
    held, here.held = here.held, []  # an `abort` from here on holds those of this generation
    try:
        live = {(g.name, g.ranks): g for g in torch_groups.live_groups()}
        known = {key: torch_groups.spec_of(g.group) for key, g in live.items()}
        plan = rendezvous.meet(here, known, timeout_s, default=torch_groups.default_name())
        while held:  # every rank has released its peers by now
            os.close(held.pop())
        if plan.is_replaced:
            _destroy()
            live = {}
            _make_default(here, plan.default)
        else:
            _renew(here, [live[key] for key in plan.groups if key in live], plan.group_count)
    except BaseException:
        here.held += held
        # Half of the groups may live: no collective must pass until all do.
        abort(generation)
        raise
    finally:
        here.form_limit = None
        rendezvous.stop_sharing(here)
    if here.aborted:
        raise ReleasedError(_ABORTED)
    here.stale = tuple(key for key in plan.stale if key in live)
    return {
        "generation": generation,
        "groups": len(torch_groups.live_groups()) - len(here.stale),
        "stale": state.here.stale_groups(),
        "reforms_left": state.here.reforms_left(),
        "is_anew": plan.is_replaced,
    }


def _require_new(generation: int, here: GroupState) -> None:
    if generation <= here.generation:
        raise ClusterError(
            f"Generation {generation} of the process group has been used.",
            why=f"rank {here.rank} is at generation {here.generation}, and none is used again.",
        )
    if state.here.reforms_left() == 0:
        raise ClusterError(
            "The process group cannot be re-created any more.",
            why=f"torch numbers a group's backends in one byte, and after {here.generation} "
            "faults all numbers are used.",
            do=_RESTART,
        )


def _enter(generation: int, here: GroupState) -> None:
    # On ranks without an `abort`, too: what still runs on the old backend ends here.
    _cut(here)
    here.generation = generation
    here.env_rendezvous = 0
    here.aborted = False
    here.store.resume()


def _renew(here: GroupState, groups: Iterable[torch_groups.LiveGroup], group_count: int) -> None:
    """Give these groups new backends, in the same order on all ranks."""
    for live in groups:
        new_backends.renew(here, live)
    throttle.here.apply()
    torch_groups.default_group_store(here.place())
    torch_groups.set_group_count(group_count)


def was_released(error: BaseException) -> bool:
    """Return whether `error` merely followed from `abort` here or on a peer, at any depth."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, ReleasedError):
            return True
        # Of torch's errors and the system's: the text of a user's own is taken once, elsewhere.
        text = error_text.text_of(link) if isinstance(link, RuntimeError | OSError) else ""
        if any(mark in text for mark in _GLOO_MARKS):
            return True
        link = link.__cause__ or link.__context__
    return False


# gloo's errors when a pair was broken by us, or its peer is gone.
_GLOO_MARKS = (
    "Application timeout caused pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
)
