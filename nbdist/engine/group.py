"""The process group of this rank: join it, let go of it, form it anew.

A fault on one rank leaves its peers waiting inside C++. `abort` frees them, from any thread; then
every rank, idle again, calls `reform`, and the same `ProcessGroup` objects go on with new backends:
modules, meshes and optimizers that hold a group never notice. A killed rank's successor calls
`join` with the generation that the survivors `reform`.

Generations count from 0, the first `join`; none is ever used twice, also when it failed. All that a
generation writes in the store lies under `nbdist/GENERATION`, so that nothing a broken one left
behind can be mistaken for news.

Threads: everything here runs on the main thread, but `abort`, `status` and `was_released`, which
any thread may call at any moment.
"""

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from nbdist.engine import (
    announce,
    hook_state,
    shared_memory,
    sockets,
    tap_books,
    torch_compat,
    torch_live,
    where,
)
from nbdist.engine.announce_store import StoreTable
from nbdist.engine.patient_store import PatientStore, ReleasedError
from nbdist.engine.plan import Hello, Key, Plan, make_plan
from nbdist.engine.shared_memory import Offer, Offered
from nbdist.engine.tap_ledger import Waiting
from nbdist.engine.torch_compat import PrefixStore, Store, TCPStore
from nbdist.errors import ClusterError
from nbdist.ranks import name_ranks

log = logging.getLogger(__name__)

FORM_TIMEOUT_S = 30.0  # the longest that ranks wait for each other while they form the group
BURY_TIMEOUT_S = 1.0  # normally it takes less than a millisecond
GLOO_THREADS = 2  # per group, as in torch

_RESTART = "%dist restart    (new processes; what the ranks hold is lost)"
_ABORTED = "this rank let go of its peers, because another rank failed or the cell was interrupted"


@dataclass
class _Membership:
    """This process's place in the group."""

    rank: int
    world_size: int
    backend: str
    timeout_s: float
    client: TCPStore
    store: PatientStore
    device: Any  # gloo's
    address: sockets.Address
    generation: int
    check: str = "shared"  # how collectives are compared, see `join`
    offered: Offered | None = None  # memory for announcements, until all have mapped it
    peers: dict[int, sockets.Address] = field(default_factory=dict)  # replaced, never changed
    stale: tuple[Key, ...] = ()
    aborted: bool = False
    held: list[int] = field(default_factory=list)  # descriptors, open until all have let go
    env_rendezvous: int = 0
    form_limit: timedelta | None = None  # while we form groups; torch's own limit otherwise
    slots: "WeakKeyDictionary[dist.ProcessGroup, int]" = field(default_factory=WeakKeyDictionary)

    def place(self) -> Store:
        """Return this generation's part of the store."""
        # NCCL's own threads use the store as well: they must never wait for Python's lock.
        base = self.client if "nccl" in self.backend else self.store
        return PrefixStore(f"nbdist/{self.generation}", base)

    def make_gloo(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Return a gloo backend with the group's `timeout`, made within `form_limit`."""
        limit = self.form_limit or timeout
        new = torch_compat.make_gloo(store, rank, size, limit, self.device, GLOO_THREADS)
        new._set_default_timeout(timeout)
        return new

    def next_slot(self, group: dist.ProcessGroup) -> int:
        """Return the first backend number that `group` has not used."""
        return self.slots.get(group, torch_compat.FIRST_SLOT)


_here: _Membership | None = None
_made = 0  # groups that this process had made when it left them


def join(
    rank: int,
    world_size: int,
    store_host: str,
    store_port: int,
    backend: str,
    timeout_s: float,
    generation: int = 0,
    interface: str = "127.0.0.1",
    first_group: int = 0,
    check: str = "shared",
) -> None:
    """Become `rank` of the default process group. On the main thread; again only after `leave`.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        store_host: Where the store listens (`host/store.py`).
        store_port: Its port.
        backend: As in `init_process_group`: `gloo`, or `cpu:gloo,cuda:nccl`.
        timeout_s: Longest wait inside one collective.
        generation: 0 in a new cluster; for a rank that replaces a killed one, the generation
            which the survivors `reform` at the same time.
        interface: IP address that gloo listens on, and nothing else.
        first_group: The default group's number, from which torch makes its name. All ranks that
            join with a generation give the same, higher than any group had before a `leave`.
        check: How collectives are compared before they are sent: "shared" (memory of a host),
            "store" (between hosts too, slowly) or "off"; the same on all ranks.

    Raises:
        ClusterError: The other ranks did not arrive within FORM_TIMEOUT_S.
    """
    global _here
    if _here is not None:
        raise ClusterError(f"This process already is rank {_here.rank}.", do=_RESTART)
    _prepare_environment(store_host, store_port, interface)
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    client = TCPStore(
        store_host, store_port, None, False, timeout=timedelta(seconds=FORM_TIMEOUT_S)
    )
    device, address = _open_gloo_device(interface)
    here = _Membership(
        rank,
        world_size,
        backend,
        timeout_s,
        client,
        PatientStore(client),
        device,
        address,
        generation,
        check,
    )
    torch_compat.use_gloo_device(
        device, GLOO_THREADS, lambda wanted: min(wanted, here.form_limit or wanted)
    )
    torch_compat.answer_env_rendezvous(lambda: _answer_env(here, store_host, store_port))
    torch_live.watch()
    hook_state.watch()
    _here = here
    here.form_limit = timedelta(seconds=FORM_TIMEOUT_S)
    try:
        # Who joins knows the default group only. torch names the first group it makes by a number.
        torch_compat.set_group_count(first_group)
        plan = _meet(here, ((str(first_group), tuple(range(world_size))),), FORM_TIMEOUT_S)
        dist.init_process_group(
            backend,
            store=here.place(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        torch_compat.set_group_count(max(plan.group_count, torch_compat.group_count()))
    except BaseException:
        _here = None
        raise
    finally:
        here.form_limit = None
        _share_no_more(here)


def leave() -> int:
    """Leave every group, so that the ranks can `join` as another number. Main threads idle.

    A rank that is in no group leaves none.

    Returns:
        The first number that no group has had for its name.
    """
    global _here, _made
    groups = torch_compat.live_groups()
    _made = max(_made, torch_compat.group_count())
    if dist.is_initialized():
        torch_compat.destroy_groups()
    here, _here = _here, None
    if here is not None:
        for number in here.held:
            os.close(number)
        if here.offered is not None:
            here.offered.close()
    tap_books.close(live.group for live in groups)
    return _made


def abort(generation: int | None = None) -> int:
    """Let go of every peer: whatever waits for one raises within milliseconds. Any thread.

    The main thread, if it waits in a collective or in the store, gets an error for which
    `was_released` is true. If it does not, its next collective fails at once. Groups stay unusable
    until `reform`. Repeating it is harmless.

    Args:
        generation: The one meant. An order that arrives late, when a newer one has been formed,
            does nothing. None means whichever there is.

    Returns:
        Number of backends that were broken.
    """
    here = _here
    if here is None or (generation is not None and generation != here.generation):
        return 0
    here.aborted = True
    here.store.release(_ABORTED)
    return _cut(here)


def _cut(here: _Membership) -> int:
    """Break every pair and communicator of this process. Any thread; returns as `abort` does."""
    # A peer must not see our sockets close before it has let go itself: a gloo pair whose write
    # fails loses the operation that its event loop has just taken from the queue, and who waits
    # for that one waits for the group's whole timeout (one of ten faults in DDP's backward).
    here.held += sockets.hold(here.address, set(here.peers.values()), here.held)
    count = 0
    for live in torch_compat.live_groups():
        try:
            backends = torch_compat.backends_of(live.group)
        except RuntimeError:
            continue  # between two backends: `reform` is at it, and will see `aborted`
        for _, backend in backends:
            count += torch_compat.break_backend(backend)
    # What is in no group yet, or in one that someone made by hand. Not before: pairs that end by
    # themselves, one after the other, lose operations too.
    sockets.end_reading(here.held)
    return count


def reform(generation: int, timeout_s: float = FORM_TIMEOUT_S) -> dict[str, Any]:
    """Give every group a new backend. All ranks at the same time, main threads idle.

    Args:
        generation: Higher than any before, the same on all ranks.
        timeout_s: Longest wait for the other ranks.

    Returns:
        `generation`, `groups` (how many were re-formed), `stale` (names of those that could not
        be), `reforms_left`.

    Raises:
        ClusterError: A rank did not arrive in time, or no re-form is left.
        ReleasedError: `abort` was called meanwhile. Either way the groups are unusable until the
            next `reform`, with a higher generation.
    """
    here = _member()
    if generation <= here.generation:
        raise ClusterError(
            f"Generation {generation} of the process group has been used.",
            why=f"rank {here.rank} is at generation {here.generation}, and none is used twice.",
        )
    if reforms_left() == 0:
        raise ClusterError(
            "The process group cannot be formed anew any more.",
            why=f"torch numbers a group's backends in one byte, and after {here.generation} "
            "faults all numbers are used.",
            do=_RESTART,
        )
    # Also the ranks that nobody told to let go: what still runs on the old backend ends here.
    _cut(here)
    here.generation = generation
    here.env_rendezvous = 0
    here.aborted = False
    here.store.resume()
    here.form_limit = timedelta(seconds=timeout_s)
    try:
        live = {(g.name, g.ranks): g for g in torch_compat.live_groups()}
        held, here.held = here.held, []
        plan = _meet(here, tuple(live), timeout_s)
        for number in held:  # every rank has let go by now
            os.close(number)
        for key in plan.groups:
            if key in live:
                _renew(here, live[key])
        if dist.is_initialized():
            torch_compat.default_group_store(here.place())
        torch_compat.set_group_count(plan.group_count)
    except BaseException:
        # Half of the groups may live: no collective must pass until all do.
        abort(generation)
        raise
    finally:
        here.form_limit = None
        _share_no_more(here)
    if here.aborted:
        raise ReleasedError(_ABORTED)
    here.stale = tuple(key for key in plan.stale if key in live)
    return {
        "generation": generation,
        "groups": len(live) - len(here.stale),
        "stale": stale_groups(),
        "reforms_left": reforms_left(),
    }


def store() -> Store:
    """Return this generation's part of the store. Its waits end when this rank lets go."""
    return _member().place()


def exchange(topic: str, text: str, timeout_s: float) -> dict[int, str]:
    """Tell all ranks a text and return what each has told. All ranks, main thread.

    Through the store, so that it needs no collective, and ends in time.

    Args:
        topic: Names the exchange; used once in a generation.
        text: What this rank tells.
        timeout_s: Longest wait for the other ranks.

    Raises:
        ClusterError: A rank told nothing in time.
        ReleasedError: `abort` was called meanwhile.
    """
    return _exchange(_member(), topic, text, timeout_s)


def reforms_left() -> int | None:
    """Return how many more times this process's groups can be formed anew; None: no limit."""
    if torch_compat.can_release():
        return None
    here = _member()
    return min(
        (
            (torch_compat.LAST_SLOT + 1 - here.next_slot(live.group))
            // len(torch_compat.backends_of(live.group))
            for live in torch_compat.live_groups()
        ),
        default=torch_compat.LAST_SLOT + 1 - torch_compat.FIRST_SLOT,
    )


def stale_groups() -> list[str]:
    """Return the groups that the last `reform` could not form, e.g. `group 1 (ranks 0-1)`."""
    return [f"group {name} ({name_ranks(ranks)})" for name, ranks in _member().stale]


def was_released(error: BaseException) -> bool:
    """Return whether `error` merely followed from `abort` here or on a peer, at any depth."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, ReleasedError) or any(mark in str(link) for mark in _GLOO_MARKS):
            return True
        link = link.__cause__ or link.__context__
    return False


# What gloo says when a pair was broken by us, or its peer is gone.
_GLOO_MARKS = (
    "Application timeout caused pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
)


def status() -> dict[str, Any]:
    """Return facts for `%dist status`: plain values, no collective, any thread."""
    here = _here
    if here is None:
        return {"joined": False}
    return {
        "joined": True,
        "rank": here.rank,
        "world_size": here.world_size,
        "backend": here.backend,
        "generation": here.generation,
        "aborted": here.aborted,
        "reforms_left": reforms_left(),
        "stale_groups": stale_groups(),
        "gloo_address": f"{here.address[0]}:{here.address[1]}",
        "timeout_s": here.timeout_s,
    }


def waiting_in_store() -> Waiting | None:
    """Return the main thread's wait in the store, say in `new_group`. Any thread."""
    here = _here
    since = None if here is None else here.store.main_waits_since
    if here is None or since is None:
        return None
    place = where.main_thread()
    line = None if place is None else place["file_line"]
    seconds = time.monotonic() - since
    return Waiting("store", "", 0, 0, seconds, line, ranks=tuple(range(here.world_size)))


def _member() -> _Membership:
    if _here is None:
        raise ClusterError("This process has joined no process group.", do="%dist restart")
    return _here


def _prepare_environment(store_host: str, store_port: int, interface: str) -> None:
    # MASTER_* and the agent's store: a program's own `init_process_group("env://")` comes to our
    # store as a client, and no rank ever hosts one. The rest keeps NCCL's watchdog from ending
    # the process over a communicator that we abort ourselves, and on the chosen interface.
    os.environ.update(
        MASTER_ADDR=store_host,
        MASTER_PORT=str(store_port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        TORCH_NCCL_ENABLE_MONITORING="0",
        TORCH_NCCL_DUMP_ON_TIMEOUT="0",
    )
    name = _interface_name(interface)
    if name is not None:
        # Also for a backend that someone makes by hand, past our device.
        os.environ.update(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=name)


def _interface_name(address: str) -> str | None:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None


def _open_gloo_device(interface: str) -> tuple[Any, sockets.Address]:
    before = sockets.listeners()
    device = dist.ProcessGroupGloo.create_device(hostname=interface, lazy_init=False)
    new = sockets.listeners() - before
    if len(new) != 1:
        raise ClusterError(
            "gloo's listening socket could not be told from others.",
            why=f"{len(new)} sockets began to listen while gloo opened its own on {interface}.",
            do="%dist restart",
        )
    return device, new.pop()


def _answer_env(
    here: _Membership, store_host: str, store_port: int
) -> tuple[Store, int, int] | None:
    environ = os.environ
    if (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")) != (store_host, str(store_port)):
        return None
    here.env_rendezvous += 1
    store = PrefixStore(f"env/{here.env_rendezvous}", here.place())
    rank = int(environ.get("RANK", here.rank))
    return store, rank, int(environ.get("WORLD_SIZE", here.world_size))


def _meet(here: _Membership, groups: tuple[Key, ...], timeout_s: float) -> Plan:
    """Tell the other ranks of this process, hear of theirs, and return what follows."""
    here.offered = _share(here)
    offer = None if here.offered is None else here.offered.offer
    hello = Hello(here.address, groups, torch_compat.group_count(), offer)
    texts = _exchange(here, "hello", hello.to_json(), timeout_s)
    hellos = {rank: Hello.from_json(text) for rank, text in texts.items()}
    here.peers = {rank: said.address for rank, said in hellos.items() if rank != here.rank}
    tap_books.begin_generation(_announcements(here, hellos[0].memory))
    return make_plan(hellos)


def _announcements(here: _Membership, offer: Offer | None) -> announce.Table | StoreTable | None:
    """Return where this generation's collectives are announced; `offer` is rank 0's memory."""
    if here.check == "store":
        limit = timedelta(seconds=here.timeout_s)
        return StoreTable(here.store, here.rank, here.generation, limit)
    memory = None if offer is None else shared_memory.accept(offer)
    return None if memory is None else announce.Table(memory, here.rank)


def _exchange(here: _Membership, topic: str, text: str, timeout_s: float) -> dict[int, str]:
    store = PrefixStore(f"nbdist/{here.generation}/{topic}", here.store)
    store.set(str(here.rank), text)
    ranks = range(here.world_size)
    try:
        store.wait([str(rank) for rank in ranks], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [rank for rank in ranks if not store.check([str(rank)])]
        raise ClusterError(
            f"The process group was not formed: {name_ranks(missing)} did not arrive.",
            why=f"rank {here.rank} waited {timeout_s:g} s for generation {here.generation}.",
            do="%dist restart",
        ) from error
    texts = store.multi_get([str(rank) for rank in ranks])
    return {rank: bytes(text).decode() for rank, text in zip(ranks, texts, strict=True)}


def _share(here: _Membership) -> Offered | None:
    """Make memory for announcements, on rank 0; None when there is none to be had."""
    if here.rank or here.world_size == 1 or here.check != "shared":
        return None
    if here.offered is not None:
        here.offered.close()
    try:
        return Offered(announce.size_bytes(here.world_size))
    except OSError as error:
        log.warning("Collectives are not compared between ranks: %s", error)
        return None


def _share_no_more(here: _Membership) -> None:
    # The groups have been formed, and gloo's ranks have met in them after they mapped the memory.
    # NCCL's meet later: there it is kept until the next generation.
    if here.offered is not None and "gloo" in here.backend:
        here.offered.close()
        here.offered = None


def _renew(here: _Membership, live: torch_compat.LiveGroup) -> None:
    """Give one group new backends; the other members do the same at this moment."""
    place = PrefixStore(f"{live.name}/", here.place())
    rank = live.ranks.index(here.rank)
    description = live.group.group_desc
    made, gone = [], []
    for devices, old in torch_compat.backends_of(live.group):
        # The same nesting as torch's own for a group it makes: a newcomer's `join` makes it there.
        store = PrefixStore(f"{devices[0].type}/", place)
        new = torch_compat.remake_backend(old, store, live, rank, here.make_gloo)
        made.append((devices, torch_compat.native_slot(old), new))
        gone.append(old)
        del old
    if torch_compat.can_release():
        torch_compat.release_backends(live.group)
        for devices, slot, new in made:
            torch_compat.put_backend(live.group, devices, slot, new)
    else:
        for devices, _, new in made:
            slot = here.next_slot(live.group)
            here.slots[live.group] = slot + 1
            torch_compat.put_backend(live.group, devices, slot, new)
    _bury(gone)
    # A group's name and description live in its backends.
    live.group._set_group_name(live.name)  # type: ignore[arg-type]
    live.group._set_group_desc(description)


def _bury(backends: list[Any]) -> None:
    """Drop the last references to old backends, without trusting them to go.

    A backend waits for what was launched on it. Should that never end, a thread is lost and not
    the rank: its destructor runs without Python's lock.
    """
    undertaker = threading.Thread(target=backends.clear, name="nbdist-old-backend", daemon=True)
    undertaker.start()
    undertaker.join(BURY_TIMEOUT_S)
    if undertaker.is_alive():
        log.warning("An old backend of the process group still waits for an operation.")
