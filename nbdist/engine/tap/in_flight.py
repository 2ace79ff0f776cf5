"""The tap's state: launches under way, ends, and the main thread's waits.

`tap.py` writes here from the operators and the waits; its docstring explains the figures.
"""

import threading
from collections import deque
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from nbdist.engine.compat import torch_hooks
from nbdist.engine.compat.groups import torch_backends
from nbdist.engine.kernel import location
from nbdist.engine.tap import counters, intervals
from nbdist.engine.tap.collective import MESSAGES, LaunchedCollective
from nbdist.engine.tap.cuda_times import CudaTimes, pointers
from nbdist.engine.tap.encode import Templates
from nbdist.engine.tap.sampling import StepSampling
from nbdist.shared.packed import ANY_TAG, Calls

Level = Literal["off", "counts", "full"]

MAX_ROWS = 8192  # sampled between two steps; more are counted only
SHORT_NS = 100_000  # a wait for what is over; Python waits once more for what the operator did
MAX_UNDER_WAY = 4096  # launches whose end has not been seen
MAX_HELD = 64  # Works without a future kept to ask for their end
MAX_LATE = 8  # sampled steps that wait for their GPU
MAX_UNSAMPLED = 8  # under way before those that are over are looked for


@dataclass(frozen=True, slots=True)
class Waiting:
    """The collective that the main thread is in.

    `seq` numbers the group's collectives from 1, since it was formed. `line` is where in a cell
    it was launched, "file:line", at level "full". `is_certain` is False inside backward, where
    DDP waits out of sight: the collective is under way, the main thread may also be computing; and
    inside C++ that waits for what it has launched, where its end is not watched for.
    `ranks` are the group's, global. Of a message (send, recv) `peer` is the other rank, None where
    any will do, `seq` its number among those to or from that peer, and `tag_number` that among
    those with its `tag` (0: not known). A wait in the store has the kind "store", no group and no
    number. `title` is the group in words, such as "group dp".
    """

    kind: str
    group: str
    seq: int
    bytes: int
    seconds: float
    line: str | None = None
    is_certain: bool = True
    ranks: tuple[int, ...] = ()
    peer: int | None = None
    title: str = ""
    tag: int = 0
    tag_number: int = 0

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "ranks": [*self.ranks]}


class Traffic(NamedTuple):
    """What passed since the last `take`.

    `exposed_ns`: the main thread waited. `total_ns`: union of the collectives' intervals, None
    below level "full" and in steps that are not sampled. `bytes`: what this rank put in. `untimed`:
    collectives whose end is not known (yet). `calls`: the rows of a sampled step, `calls_step`,
    which on CUDA is often the one before. `stream_ns`: the compute stream's waits in the last
    sampled step that the GPU is through with, an estimate for this one.
    """

    exposed_ns: int
    total_ns: int | None
    bytes: int
    collectives: int
    untimed: int
    calls: Calls | None = None
    calls_step: int = 0
    stream_ns: int = 0


class TapState:
    """The tap's state; one per process, `state`."""

    def __init__(self) -> None:
        self.level: Level = "off"
        self.undo: list[torch_hooks.Undo] = []
        self.latency_s = 0.0  # emulated: each round of a collective ends so much later
        self.main = threading.main_thread().ident
        self.bytes = 0  # since the last take, as the three below
        self.collectives = 0
        self.sampled = 0  # the sampled ones among them
        self.exposed_ns = 0
        self.under_way: dict[
            int, LaunchedCollective
        ] = {}  # asynchronous ones, and all sampled; by `number`
        self.held: deque[LaunchedCollective] = (
            deque()
        )  # without a future, kept to ask for their end
        self.launched = 0
        self.last: LaunchedCollective | None = None
        # By thread, since when (ns): the main one, and those that run its backward.
        self.blocked: dict[int, tuple[LaunchedCollective | None, int]] = {}
        # The main thread is in C++ that waits for what it launches.
        self.native: Since | None = None
        self.backward: Backward | None = None
        self.seen_until_ns = 0  # intervals up to here have been taken
        self.cuda = CudaTimes()
        # Addresses of tensors that the loop itself all-reduces, outside of backward; where asked.
        self.reduced: deque[tuple[int, int]] | None = None
        self.begin_sampling()

    def begin_sampling(self) -> None:
        """Sample steps from here on, starting with the first."""
        self.stride = StepSampling()
        self.templates = Templates()
        self.is_sampling = True  # the step that runs is sampled
        # At the end of backward, when all that it launched was over, in the newest sampled steps.
        # The least counts: for lack of a core it may have lasted longer in one of them.
        self.computed_ns: deque[int] = deque(maxlen=8)
        self.ended: deque[LaunchedCollective] = deque()  # since the last take
        self.rows: list[LaunchedCollective] = []  # ended before the last take, not reported yet
        self.waits: deque[tuple[int, int]] = deque(maxlen=MAX_ROWS)
        self.skipped = 0
        # Steps and their ends, to be reported when their GPU is through.
        self.late: deque[tuple[int, int]] = deque()
        self.cuda.forget()


class Since:
    """A call of the main thread that launches collectives it may wait for in C++."""

    __slots__ = ("before", "first_launch")

    def __init__(self, state: TapState) -> None:
        self.first_launch = state.launched + 1
        self.before = state.last

    def under_way(self) -> LaunchedCollective | None:
        """Return the oldest launch in it that is not known to be over."""
        for number, launch in sorted(state.under_way.copy().items()):
            if number >= self.first_launch and not launch.is_over():
                return launch
        return None

    def unknown(self) -> LaunchedCollective | None:
        """Return the newest launch in it, where its end is not looked for.

        That is so below level "full", and on CUDA.
        """
        launch = state.last
        if launch is None or launch is self.before or launch.number or launch.is_waited_for:
            return None
        return launch


class Backward(Since):
    """A backward that the main thread is in."""

    __slots__ = ("exposed_ns", "last", "last_launch_ns")

    def __init__(self, state: TapState) -> None:
        super().__init__(state)
        self.last: LaunchedCollective | None = None
        self.last_launch_ns = 0
        self.exposed_ns = state.exposed_ns


state = TapState()


def reset_counts() -> None:
    """Begin to count at zero: the groups have been re-created."""
    counters.reset()
    state.under_way.clear()
    state.held.clear()
    state.cuda.forget()


def begin_cell() -> None:
    """A cell begins: its steps are counted from 1, and launches of the last one are dropped."""
    for launch in tuple(state.under_way.values()):
        launch.is_sampled = False
    state.begin_sampling()


def last_kind() -> str | None:
    """Return the kind of the newest collective, such as "all_reduce"; None before the first."""
    last = state.last
    return None if last is None else last.kind


def waiting() -> Waiting | None:
    """Return the collective that the main thread waits in now, from any thread.

    A wait of an autograd thread that runs its backward counts as its own.
    """
    now = perf_counter_ns()
    blocked, since = state.blocked.copy(), state.native or state.backward
    if blocked:
        launch, since_ns = min(blocked.values(), key=lambda each: each[1])
        return None if launch is None else _describe(launch, now - since_ns, is_certain=True)
    if since is None:
        return None
    if launch := since.under_way():
        is_certain = since is state.native
        return _describe(launch, now - launch.start_ns, is_certain=is_certain)
    if launch := since.unknown():
        return _describe(launch, now - launch.start_ns, is_certain=False)
    return None


def _describe(launch: LaunchedCollective, for_ns: int, *, is_certain: bool) -> Waiting:
    return Waiting(
        launch.kind,
        launch.book.name,
        launch.seq,
        launch.bytes,
        for_ns / 1e9,
        location.describe(launch.place),
        is_certain,
        launch.book.ranks,
        launch.peer,
        launch.book.title,
        launch.tag,
        launch.tag_number if launch.is_message and launch.tag != ANY_TAG else 0,
    )


def untaken_bytes() -> float | None:
    """Return the bytes put in since the last `take` or `take_counts`; None with the tap off."""
    return None if state.level == "off" else float(state.bytes)


def take_counts() -> tuple[float, float] | None:
    """Return the bytes put in and the collectives since the last call; None with the tap off.

    For a step that is not measured: its waits are reset, and not returned. Main thread.
    """
    state.skipped += state.collectives
    found = float(state.bytes), float(state.collectives)
    state.exposed_ns = state.bytes = state.collectives = state.sampled = 0
    return None if state.level == "off" else found


def take(step: int | None = None, end_ns: int | None = None, *, is_next: bool = True) -> Traffic:
    """Return what passed since the last call. On the main thread.

    Args:
        step: The step that ends here; None outside of steps, where no collective is sampled.
        end_ns: When it ended; now, when not given.
        is_next: The next step is measured, so it may be sampled.
    """
    sweep()
    ended = [state.ended.popleft() for _ in range(len(state.ended))]
    if ended or state.under_way:
        _find_begins(ended)
    is_timed = state.level == "full" and state.sampled == state.collectives
    total_ns = _total_ns(ended) if is_timed else None
    state.rows += ended
    total_ns = _take_cuda(total_ns)
    passed = None
    if step is not None:
        state.skipped += state.collectives - state.sampled
    else:  # what builds a model, or ends a cell, is nothing that was left out of steps
        state.rows, state.waits = [], deque(maxlen=MAX_ROWS)
        state.cuda.forget()
    if step is not None and state.level == "full":
        if state.is_sampling:
            state.late.append((step, end_ns or perf_counter_ns()))
        state.is_sampling = is_next and state.stride.samples(step + 1)
        passed = late()
    if state.level == "full":
        state.cuda.begin_step((step or 0) + 1 if state.is_sampling else None)
    calls_step, calls = passed or (0, None)
    traffic = Traffic(
        *(state.exposed_ns, total_ns, state.bytes, state.collectives, len(state.under_way)),
        calls=calls,
        calls_step=calls_step,
        stream_ns=state.cuda.exposed_ns,
    )
    state.exposed_ns = state.bytes = state.collectives = state.sampled = 0
    if state.backward is not None:
        state.backward.exposed_ns = 0
    return traffic


def look_for_reductions(is_on: bool) -> dict[int, int]:
    """Start or stop recording what the main thread all-reduces after a backward.

    Returns:
        The addresses of the tensors noted since the last backward began, the newest `MAX_ROWS`,
        each with the number of ranks in the group that has reduced it.
    """
    noted = dict(state.reduced or ())
    state.reduced = deque(maxlen=MAX_ROWS) if is_on else None
    return noted


def late() -> tuple[int, Calls] | None:
    """Return the oldest sampled step that has passed, and its rows; None: there is none.

    On CUDA a step passes later than the host makes it. On the main thread.
    """
    if not state.late:
        return None
    step, end_ns = state.late[0]
    if state.cuda.is_open(step):
        _take_cuda(None)
        if state.cuda.is_open(step) and len(state.late) <= MAX_LATE:
            return None
    state.late.popleft()
    return step, _pack_rows(end_ns)


def _take_cuda(total_ns: int | None) -> int | None:
    """Take what the GPU has passed; return the total with what is known of the GPU's."""
    cuda = state.cuda
    if not cuda.is_used:
        return total_ns
    took = cuda.take()
    state.rows += took.ended
    state.waits += took.waits
    state.skipped, cuda.dropped = state.skipped + cuda.dropped, 0
    return None if total_ns is None or cuda.total_ns is None else total_ns + cuda.total_ns


def _total_ns(ended: list[LaunchedCollective]) -> int:
    pairs = [(launch.begin_ns, launch.end_ns) for launch in ended]
    total_ns = intervals.union(pairs, since=state.seen_until_ns)
    state.seen_until_ns = max((end for _, end in pairs), default=state.seen_until_ns)
    return total_ns


def _find_begins(ended: list[LaunchedCollective]) -> None:
    """Find when each was taken up, those under way included."""
    under_way = [launch for launch in tuple(state.under_way.values()) if launch.is_sampled]
    by_book: dict[counters.GroupCounters, list[LaunchedCollective]] = {}
    for launch in ended + under_way:
        if launch.begin_ns == 0 and (launch.is_message or not launch.book.workers):
            launch.begin_ns = launch.ready_ns
        else:
            by_book.setdefault(launch.book, []).append(launch)
    for book, launches in by_book.items():
        launches.sort(key=lambda launch: launch.number)
        busy = [launch.end_ns or None for launch in launches if launch.begin_ns]
        waiting = [launch for launch in launches if not launch.begin_ns]
        handed = [(launch.ready_ns, launch.end_ns or None) for launch in waiting]
        found = intervals.begins(handed, book.workers, busy) if handed else []
        for launch, begin_ns in zip(waiting, found, strict=True):
            launch.begin_ns = begin_ns


def _pack_rows(end_ns: int) -> Calls:
    calls = state.templates.pack(state.rows, state.waits, state.skipped, end_ns)
    state.stride.sampled(perf_counter_ns(), len(state.rows))
    state.rows, state.waits, state.skipped = [], deque(maxlen=MAX_ROWS), 0
    return calls


def exposed_ns() -> int:
    """Return how long the main thread was blocked since the last `take`. On the main thread."""
    return state.exposed_ns


def backward_began() -> None:
    """The main thread enters an outermost backward."""
    state.backward = Backward(state)
    if state.reduced:
        state.reduced.clear()  # gradients may lie where something else was reduced, and is gone
    if state.cuda.is_used:
        state.cuda.backward_began()


def backward_ended(*, is_measured: bool = True) -> None:
    """The main thread leaves it: what was under way at its end is what DDP waited for."""
    backward, state.backward = state.backward, None
    if state.cuda.is_used:
        state.cuda.backward_ended()
    if not is_measured or backward is None or backward.last_launch_ns == 0:
        return
    end_ns, start_ns = perf_counter_ns(), backward.last_launch_ns
    counted_ns = state.exposed_ns - backward.exposed_ns
    if not state.is_sampling:  # ends are not looked for: as in the sampled backwards
        computed_ns = min(state.computed_ns, default=0)
        state.exposed_ns += max(0, end_ns - start_ns - counted_ns - computed_ns)
        return
    sweep()
    seen = [(launch.start_ns, launch.end_ns) for launch in tuple(state.ended)]
    waited = intervals.merged(seen, since=start_ns, until=end_ns)
    waited_ns = sum(end - start for start, end in waited)
    state.computed_ns.append(max(0, end_ns - start_ns - waited_ns))
    # Waits that were seen one by one after the last launch are counted already.
    state.exposed_ns += max(0, waited_ns - counted_ns)
    state.waits += intervals.without(waited, [w for w in state.waits if w[1] > start_ns])


def waited(start_ns: int, end_ns: int, *, is_found: bool = True) -> None:
    """The main thread was blocked in a collective; one that is not found was most likely over."""
    state.exposed_ns += end_ns - start_ns
    if state.is_sampling and (is_found or end_ns - start_ns > SHORT_NS):
        state.waits.append((start_ns, end_ns))


def sample(launch: LaunchedCollective) -> bool:
    """Return whether a new launch is sampled, and count it if so."""
    launch.is_sampled = state.is_sampling and state.sampled < MAX_ROWS
    state.sampled += launch.is_sampled
    return launch.is_sampled


def ended(launch: LaunchedCollective, end_ns: int) -> None:
    """Note the end of a sampled synchronous operator: its caller has waited for it."""
    launch.number = state.launched = state.launched + 1
    launch.end_ns = end_ns
    state.ended.append(launch)


def expect_end(launch: LaunchedCollective, work: Any, outputs: Any, *, trains: bool) -> None:
    """Note the end of an operator when it comes; an unsampled one is only dropped when it is over.

    DDP's reducer may wait for what a thread that `trains` has launched within backward.
    """
    number = launch.number = state.launched = state.launched + 1
    launch.work, launch.outputs = work, outputs
    under_way = state.under_way
    under_way[number] = launch
    backward = state.backward
    if trains and backward is not None:
        backward.last_launch_ns, backward.last = launch.handed_ns, launch
        backward.exposed_ns = state.exposed_ns
    if len(under_way) > MAX_UNSAMPLED:
        if len(under_way) > MAX_UNDER_WAY:
            _drop(next(iter(under_way)))
        elif not launch.is_sampled:
            sweep()
    if work is None or not (launch.is_sampled or launch.kind in MESSAGES):
        return
    if launch.kind not in MESSAGES:
        launch.future = torch_hooks.future_of(work)
    if launch.future is not None:
        # On gloo's thread.
        launch.future.add_done_callback(lambda _: _note_end(number, perf_counter_ns()))
    else:
        _hold(launch)  # a wait for it shows its end, or the next `take`


def is_waited_as(launch: LaunchedCollective, work: Any) -> None:
    """The program receives another Work than the backend returned."""
    launch.work = work
    if launch.number not in state.under_way:  # its end may come at any moment, on gloo's thread
        launch.forget()


def was_waited_for(launch: LaunchedCollective) -> None:
    """The main thread has waited for it, where the tap could see."""
    sweep(launch)
    backward = state.backward
    if backward is not None and backward.last is launch and not launch.is_sampled:
        backward.last_launch_ns = 0  # not DDP's, then: the rest of backward is no wait


def _note_end(number: int, end_ns: int) -> None:
    launch = state.under_way.pop(number, None)
    if launch is not None:  # by the callback or by a sweep, whichever is first
        if launch.is_sampled:
            launch.end_ns = end_ns
            state.ended.append(launch)
        launch.forget()


def _drop(number: int) -> None:
    launch = state.under_way.pop(number, None)
    if launch is not None and launch.is_sampled:
        state.skipped += 1


def _hold(launch: LaunchedCollective) -> None:
    """Keep few Works alive, for they hold their tensors; the end of older ones is not seen."""
    held = state.held
    held.append(launch)
    while len(held) > MAX_HELD or (held and held[0].number not in state.under_way):
        oldest = held.popleft()
        _drop(oldest.number)
        oldest.forget()


def launch_of(target: Any) -> LaunchedCollective | None:
    """Return the launch of a Work, or of an output tensor; None if it is over."""
    pointer = target.data_ptr() if isinstance(target, torch.Tensor) else None
    for launch in tuple(state.under_way.values()):
        if launch.work is target if pointer is None else pointer in pointers(launch.outputs):
            return launch
    return None


def end_receives_from_anyone(group: dist.ProcessGroup) -> None:
    """End the waits for a message from any source of this gloo group (`was_let_go`).

    Any thread.
    """
    for launch in state.under_way.copy().values():
        is_from_anyone = launch.kind == "recv" and launch.peer is None
        if is_from_anyone and launch.book.group() is group and (work := launch.work) is not None:
            torch_backends.end_receive(work)


def was_let_go(launch: LaunchedCollective | None, result: Any) -> bool:
    """Return whether a wait's result says that `end_receives_from_anyone` has ended it."""
    return result is False and launch is not None and launch.kind == "recv" and launch.peer is None


def sweep(waited_for: LaunchedCollective | None = None) -> None:
    """Note the end of those under way that are over.

    A waiting thread may continue before the callback runs; gloo's send and recv have no future, nor
    do they ever say that they are completed.
    """
    under_way = state.under_way
    for number, launch in tuple(under_way.items()):
        if launch.is_sampled or launch is waited_for:
            if launch is waited_for or launch.is_over():
                _note_end(number, perf_counter_ns())
        elif (work := launch.work) is not None and work.is_completed():
            # Not sampled: only its references are dropped.
            under_way.pop(number, None)
            launch.forget()
