"""See every collective of this rank: count it, time it, name the one the main thread waits in.

The tap puts Python functions in the place of torch's kernels of the `c10d` operators
(`ops.py`), below DDP's reducer, FSDP, DTensor and the Python API. Each call asks the process
group for its backend, for a fault may have put another one there.

Levels: "off" takes everything out, native speed (on a GPU, messages that gloo cannot send are
refused at every level). "counts": number, bytes and kind, and the time
the main thread waits where Python sees it, which is not in DDP's reducer. "full": also when each
collective ran, and the line of the cell that launched it. All ranks must be at the same level.

**What the times mean.** A call *begins* when one of gloo's workers takes it up, which follows from
launches and ends (`intervals.py`; a worker that wakes late is not noticed), and *ends* when gloo
says so on its own thread. A message begins when the launching function returns, for gloo sends
within it, and ends with the wait for it. Copies around an operation are not in it: gloo's
reduce-scatter is carried out here in its steps, copy, all_reduce, copy out. *Total* is the union of
the intervals from begin to end, on CPU; overlap counts once. Both are known of steps that are
*sampled* (`sampling.py`); in the others no callback runs. *Exposed* is the time during which the
main thread waited for a collective and could do nothing else:

- synchronous operators (`dist.all_reduce(x)`; FSDP2 on CPU, where gathers and reduce-scatters
  are synchronous): from launch to end, measured in the operator itself;
- asynchronous ones: the time inside `Work.wait()`, or `wait_tensor` for functional collectives
  and DTensor;
- DDP, whose reducer waits in C++ at the end of backward: the part of the time from the last
  launch within backward to backward's end in which a collective launched in this backward was
  under way (in steps that are not sampled: all of it), waits counted above left out. What the main
  thread computes after the last launch counts as waiting there; for DDP that is the copying out
  of buckets. DDP's waits in C++ outside of backward (buckets rebuilt, buffers sent) are shown by
  `waiting`, and not counted.

On CUDA moments are the GPU's, by events in its streams, and exposed is what the compute stream
waited besides what the host was blocked (`cuda_times.py`).

Threads: operators run on whatever thread launches them, ends on gloo's. "The main thread" above is
also an autograd thread that runs its backward (`kernel/backward_threads`). `waiting`, `counts` and
`last_kind` may be called on any thread; `install` and `set_level` on the main thread while no
collective is under way.
"""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from time import perf_counter_ns, sleep, thread_time_ns
from typing import Any

import torch

from nbdist.engine.compat import torch_hooks, torch_sharded
from nbdist.engine.compat.cuda_graphs import graphs
from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.component import Component
from nbdist.engine.kernel import backward_threads, location
from nbdist.engine.kernel.cost_clock import clock
from nbdist.engine.tap import collective_check, purpose
from nbdist.engine.tap.collective import LaunchedCollective
from nbdist.engine.tap.counters import GroupCounters, book_of, counts, received, sent, tagged
from nbdist.engine.tap.cuda_times import around_wait
from nbdist.engine.tap.in_flight import (
    Level,
    Since,
    Traffic,
    Waiting,
    backward_began,
    backward_ended,
    begin_cell,
    ended,
    expect_end,
    exposed_ns,
    is_waited_as,
    last_kind,
    late,
    launch_of,
    look_for_reductions,
    reset_counts,
    sample,
    state,
    take,
    take_counts,
    untaken_bytes,
    waited,
    waiting,
    was_let_go,
    was_waited_for,
)
from nbdist.engine.tap.interruptible_store import ReleasedError
from nbdist.engine.tap.message_check import MessageEnd
from nbdist.engine.tap.ops import (
    OPS,
    Op,
    describer,
    dtype_index,
    refuse_message,
    refusing,
    size_bytes,
)
from nbdist.shared.collectives import rounds
from nbdist.shared.errors import MismatchError
from nbdist.shared.wire import CellStart

__all__ = [
    "LEVELS",
    "Traffic",
    "Waiting",
    "backward_began",
    "backward_ended",
    "begin_cell",
    "counts",
    "exposed_ns",
    "install",
    "last_kind",
    "late",
    "level",
    "look_for_reductions",
    "received",
    "reset_counts",
    "sent",
    "set_level",
    "tagged",
    "take",
    "take_counts",
    "untaken_bytes",
    "waiting",
]

_log = logging.getLogger("nbdist.tap")

LEVELS: tuple[Level, ...] = ("off", "counts", "full")
DEVICES = ("cpu", "cuda")


def install(level: str = "full") -> None:
    """Start recording collectives; the same as `set_level`.

    Raises:
        ValueError: No such level.
    """
    set_level(level)


def level() -> str:
    """Return the level in force."""
    return state.level


def set_level(level: str) -> None:
    """Change what is recorded of collectives; all ranks must do the same.

    Raises:
        ValueError: No such level.
    """
    if level not in LEVELS:
        raise ValueError(f"the tap's level is one of {', '.join(LEVELS)}, not {level!r}")
    if level == state.level and state.undo:
        return
    for undo in state.undo:
        undo()
    state.undo.clear()
    state.level = level
    state.main = threading.main_thread().ident  # this module may have been imported before a fork
    state.under_way.clear()
    state.held.clear()
    state.begin_sampling()
    known = torch_hooks.collective_ops()
    if level == "off":
        guards = {n: refusing(op, "cuda") for n, op in OPS.items() if op.is_message and n in known}
        state.undo.append(torch_hooks.place_kernels(guards, "cuda"))
        return
    for device in DEVICES:
        kernels = {
            name: _kernel(op, device, is_full=level == "full")
            for name, op in OPS.items()
            if op.launch is not None and name in known
        }
        state.undo.append(torch_hooks.place_kernels(kernels, device))
    inner = []
    if level == "full" and torch.cuda.is_available():
        around = around_wait(state.cuda)
        inner = [torch_hooks.wrap_work_wait(around), torch_hooks.wrap_wait_tensor(around)]
    state.undo.append(torch_hooks.wrap_work_wait(_timed_wait))
    state.undo.append(torch_hooks.wrap_wait_tensor(_timed_wait))
    state.undo.append(torch_hooks.wrap_waits_in_native(_waits_in_native))
    state.undo.append(torch_sharded.wrap_sends(purpose.declared))
    state.undo.append(torch_sharded.watch_frees(purpose.freed))
    state.undo += inner  # taken out from the outside in


def _kernel(op: Op, device_type: str, *, is_full: bool) -> Callable[..., Any]:
    """Return the function that carries out one operator on one kind of device."""
    launch_op, kind, sends = op.launch, op.kind, op.sends
    assert launch_op is not None
    group_at, async_at, payload_at = op.group_at, op.async_at, op.payload_at
    is_message, reduction_at, tag_at = op.is_message, op.reduction_at, op.tag_at
    describe = describer(op, device_type)
    split, prepare = op.split, op.prepare if device_type == "cpu" else None
    returns_outputs, returns_nothing = op.returns == "outputs and work", op.returns == "nothing"
    device, is_cuda = torch.device(device_type), device_type == "cuda"
    is_reduction = op.kind == "all_reduce"
    unbox, is_gloo = torch_hooks.unbox_group, torch_hooks.is_gloo
    reduction_of = torch_hooks.reduction_of
    get_ident, now, sends_for = threading.get_ident, perf_counter_ns, purpose.now
    is_mains, place_of_call = backward_threads.is_mains, backward_threads.place_of_call

    def kernel(*args: Any) -> Any:
        me = get_ident()
        trains = me == state.main or is_mains()
        clocked_ns = thread_time_ns() if clock.is_on and trains else 0
        if clocked_ns and clock.launch.is_wanted and not graphs.is_capturing:
            _price(args[group_at])
        group = unbox(args[group_at])
        if is_message and is_cuda:
            over_gloo = torch_hooks.is_over_gloo(group._get_backend(device))
            refuse_message(kind, device_type, over_gloo=over_gloo)
        book = book_of(group)
        if reduction_at is not None:
            reduction = reduction_of(args[reduction_at])  # 2 us: once
            args = (*args[:reduction_at], reduction, *args[reduction_at + 1 :])
        size = 0 if payload_at is None else size_bytes(args[payload_at])
        place = place_of_call() if is_full else None
        peer = channel = messages = None
        if is_message:
            messages = book.messages
            peer, numbers, seq = _message(book, op, args)
        else:
            channel = book.channel
            seq = book.count + 1
        start_ns = now()
        launch = LaunchedCollective(kind, book, seq, size, start_ns, place, peer)
        if is_message:
            there = -1 if peer is None else peer
            # NCCL knows no tags.
            backend = group._get_backend(device)
            tag = args[tag_at] if tag_at is not None and is_gloo(backend) else 0
            launch.tag, launch.tag_number = book.next_in_tag(sends, there, tag, seq)
        elif sends_for.purpose.unit:
            launch.unit = sends_for.purpose.unit
            sends_for.gather = launch if kind == "all_gather" else None
        state.last = launch
        if trains:
            state.blocked[me] = (launch, start_ns)
        try:
            prepared = announced = None
            try:
                backend = group._get_backend(device)
                at = 0 if place is None else location.here.prompt_of(place[0]) << 32 | place[1]
                if channel is not None:
                    call, compared = describe(args, size)
                    if is_cuda and book.is_split:
                        call += collective_check.CUDA
                    splits = () if split is None else split(args, len(book.ranks))
                    if splits is not None:
                        channel.announce(
                            seq, call, compared, size or compared, at, sends_for.purpose, splits
                        )
                elif messages is not None:
                    end = MessageEnd(dtype_index(args[0]), size, at)
                    is_second = is_cuda and book.is_split
                    announced = messages.announce(sends, peer, tag, is_second, end)
                if prepare is not None and is_gloo(backend):
                    prepared = prepare(backend, *args)
                arrival = state.cuda.begin(args[:2]) if is_cuda and is_full else None
                by_host = is_full and (not is_cuda or (state.cuda.lacks_clock and is_gloo(backend)))
                if clocked_ns:
                    clock.add("tap", thread_time_ns() - clocked_ns)
                launch.handed_ns = now()
                work = launch_op(backend, *args) if prepared is None else prepared.launch()
                launch.returned_ns = now()
                if state.latency_s and work is not None and not is_message:
                    late_s = state.latency_s * rounds(kind, len(book.ranks), "gloo")
                    work = torch_hooks.work_after(work, partial(sleep, late_s))
                if clocked_ns:
                    clocked_ns = thread_time_ns()
            except MismatchError:
                raise
            except BaseException:  # an interrupt too: nothing was sent
                if channel is not None:
                    channel.withdraw(seq)
                elif messages is not None and announced is not None:
                    messages.withdraw(announced)
                raise
            if is_message:
                numbers[there] = seq
                book.count_in_tag(sends, there, launch.tag, launch.tag_number)
            else:
                book.count = seq
            if not graphs.is_capturing:  # it is sent at each replay, which nothing sees
                state.collectives += 1
                state.bytes += size if sends else 0
            if state.reduced is not None and trains and is_reduction and state.backward is None:
                state.reduced.extend((t.data_ptr(), len(book.ranks)) for t in args[0])
            is_sync = returns_nothing or (
                async_at is not None and len(args) > async_at and not args[async_at]
            )
            # Of a message only a wait of the main thread shows the end.
            has_end = is_sync or trains or not is_message or peer is None
            if by_host and has_end:
                if state.is_sampling and sample(launch):
                    launch.dtype = 0 if payload_at is None else dtype_index(args[payload_at])
                if is_cuda or not is_sync:
                    expect_end(launch, work, args[0], trains=trains)
            if arrival is not None and sample(launch):
                launch.dtype = 0 if payload_at is None else dtype_index(args[payload_at])
                is_on_host = is_gloo(backend)
                state.cuda.launched(launch, arrival, work, args[0], is_gloo=is_on_host)
            if is_message and trains:  # gloo sends in the call what the socket takes
                waited(launch.handed_ns, launch.returned_ns, is_found=False)
            finish = None if prepared is None else prepared.finish
            if is_sync and not is_cuda:
                _wait_here(launch, work, finish, trains)
            elif finish is not None:
                work = torch_hooks.work_after(work, finish)
                is_waited_as(launch, work)
        finally:
            if trains:
                state.blocked.pop(me, None)
        if clocked_ns:
            clock.add("tap", thread_time_ns() - clocked_ns + clock.launch.ns)
        if returns_nothing:
            return None
        if work is None:
            work = torch_hooks.finished_work()
        return (args[0], work.boxed()) if returns_outputs else work.boxed()

    torch_hooks.keep_uncompiled(kernel)
    return kernel


def _price(group: Any) -> None:
    """Measure what torch's call of a kernel takes; if that fails, calls have no price."""
    try:
        clock.launch.note(torch_hooks.price_of_launch(group))
    except Exception:
        clock.launch.is_wanted = False
        _log.exception("What torch's call of a collective's kernel takes is not known")


def _message(
    book: GroupCounters, op: Op, args: tuple[Any, ...]
) -> tuple[int | None, dict[int, int], int]:
    """Return a message's peer (global, None for any), the numbers it counts in, and its own."""
    numbers = book.sent if op.sends else book.received
    peer = None
    if op.peer_at is not None:
        there = args[op.peer_at]
        peer = book.ranks[there] if there < len(book.ranks) else there
    return peer, numbers, numbers.get(-1 if peer is None else peer, 0) + 1


def _wait_here(
    launch: LaunchedCollective, work: Any, finish: Callable[[], object] | None, trains: bool
) -> None:
    """Wait for a synchronous operator within it."""
    end_ns = 0
    if work is not None:
        try:
            torch_hooks.native_work_wait(work)
            end_ns = perf_counter_ns()
            if finish is not None:
                finish()
        except RuntimeError:
            # The caller waits for the same Work next, and gets the same error from there, as
            # without the tap.
            end_ns = 0
    launch.is_waited_for = True
    if launch.is_sampled:
        ended(launch, end_ns or perf_counter_ns())
    if trains:
        waited(launch.start_ns, perf_counter_ns())


def _timed_wait(native: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in which a thread waits for a collective it launched before."""
    get_ident, now, is_mains = threading.get_ident, perf_counter_ns, backward_threads.is_mains
    is_compiling = torch.compiler.is_compiling

    @wraps(native)
    def wait(*args: Any, **kwargs: Any) -> Any:
        me = get_ident()
        if is_compiling() or (me != state.main and not is_mains()):
            return native(*args, **kwargs)
        start_ns = now()
        blocked = state.blocked
        outer = blocked.get(me)
        # A Work, or a tensor: of a functional collective. One that is not found is over, or not
        # seen.
        launch = launch_of(args[0]) if args and state.under_way else None
        if launch is None:  # a synchronous one, which its operator has waited for
            blocked[me] = (state.last, start_ns)
            try:
                return native(*args, **kwargs)
            finally:
                _unblock(me, outer)
                if outer is None:
                    waited(start_ns, now(), is_found=False)
        blocked[me] = (launch, start_ns)
        if len(args) == 1 and not kwargs:
            args = (*args, *_limit(launch))
        try:
            result = native(*args, **kwargs)
            if was_let_go(launch, result):
                raise ReleasedError(
                    "this rank aborted its collectives while it waited for a message from any "
                    "of them"
                )
            return result
        finally:
            _unblock(me, outer)
            was_waited_for(launch)
            if outer is None:
                waited(start_ns, now())

    return wait


def _unblock(thread: int, outer: tuple[LaunchedCollective | None, int] | None) -> None:
    """A thread no longer waits, except for what it has waited for before."""
    if outer is None:
        state.blocked.pop(thread, None)
    else:
        state.blocked[thread] = outer


def _limit(launch: LaunchedCollective) -> tuple[timedelta, ...]:
    """Return how long a message of gloo may be waited for: as long as its group's collectives.

    By itself gloo takes the time within which its connections were to be made.
    """
    group = launch.book.group()
    if not launch.is_message or group is None or launch.outputs[0].is_cuda:
        return ()
    return (timedelta(seconds=torch_groups.spec_of(group).timeout_s),)


def _waits_in_native(native: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that waits in C++ for what it launches: `waiting` looks for it there."""
    get_ident, is_mains = threading.get_ident, backward_threads.is_mains

    @wraps(native)
    def function(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != state.main and not is_mains():
            return native(*args, **kwargs)
        outer = state.native
        state.native = Since(state)
        try:
            return native(*args, **kwargs)
        finally:
            state.native = outer

    torch_hooks.keep_uncompiled(function)
    return function


class Tap(Component):
    """The collectives of the cell that runs."""

    def cell_began(self, start: CellStart) -> None:
        """Count from here on: collectives of recovery belong to no cell."""
        begin_cell()
