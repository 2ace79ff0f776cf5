"""What the tap keeps: launches under way, ends, and what the main thread waits in.

`tap.py` writes here from the operators and the waits; it says what the figures mean.
"""

import threading
from collections import deque
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Literal

import torch

from nbdist.engine import where
from nbdist.engine.compat import torch_hooks
from nbdist.engine.tap import books, intervals
from nbdist.engine.tap.books import Book

Level = Literal["off", "counts", "full"]

MAX_INTERVALS = 65_536  # ends that nobody has collected; the oldest fall out
MAX_UNDER_WAY = 4096  # launches whose end has not been seen
MAX_HELD = 64  # Works kept to ask for their end


@dataclass(frozen=True, slots=True)
class Waiting:
    """The collective that the main thread is in.

    `seq` numbers the group's collectives from 1, since it was formed. `line` is where in a cell
    it was launched, "file:line", at level "full". `is_certain` is False inside backward, where
    DDP waits out of sight: the collective is under way, the main thread may also be computing.
    `ranks` are the group's, global. Of a message (send, recv) `peer` is the other rank, None where
    any will do, and `seq` its number among those to or from that peer. A wait in the store has the
    kind "store", no group and no number. `title` is the group in words, such as "group dp".
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

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "ranks": [*self.ranks]}


@dataclass(frozen=True, slots=True)
class Traffic:
    """What passed since the last `take`.

    `exposed_ns`: the main thread waited. `total_ns`: union of the collectives' intervals, None
    below level "full". `bytes`: what this rank put in. `untimed`: collectives whose end is not
    known (yet).
    """

    exposed_ns: int
    total_ns: int | None
    bytes: int
    collectives: int
    untimed: int


class Launch:
    """A collective this rank has launched."""

    __slots__ = (
        "book",
        "bytes",
        "future",
        "kind",
        "outputs",
        "peer",
        "place",
        "seq",
        "start_ns",
        "work",
    )

    def __init__(
        self,
        kind: str,
        book: Book,
        seq: int,
        size: int,
        start_ns: int,
        place: where.Place | None,
        peer: int | None,
    ) -> None:
        self.kind = kind
        self.book = book
        self.seq = seq
        self.bytes = size
        self.start_ns = start_ns
        self.place = place
        self.peer = peer
        # Only where torch gives no future: gloo's reduce-scatter, send and recv.
        self.work: Any = None
        self.outputs: tuple[int, ...] = ()  # data pointers
        self.future: Any = None


class State:
    """All that the tap keeps; one a process, `state`."""

    def __init__(self) -> None:
        self.level: Level = "off"
        self.undo: list[torch_hooks.Undo] = []
        self.main = threading.main_thread().ident
        self.bytes = 0  # since the last take, as the three below
        self.collectives = 0
        self.exposed_ns = 0
        self.ended: deque[tuple[int, int]] = deque(maxlen=MAX_INTERVALS)
        self.under_way: dict[int, Launch] = {}  # asynchronous ones; by number of launch
        self.launched = 0
        self.last: Launch | None = None
        self.blocked: tuple[Launch | None, int] | None = None  # main thread, since when (ns)
        self.seen_until_ns = 0  # intervals up to here have been taken
        self.backward: Backward | None = None


class Backward:
    """A backward that the main thread is in."""

    __slots__ = ("exposed_ns", "first_launch", "last_launch_ns")

    def __init__(self, state: State) -> None:
        self.first_launch = state.launched
        self.last_launch_ns = 0
        self.exposed_ns = state.exposed_ns


state = State()
_held: deque[Launch] = deque()


def reset_counts() -> None:
    """Begin to count at zero: the groups have been formed anew."""
    books.reset()
    state.under_way.clear()


def last_kind() -> str | None:
    """Return the kind of the newest collective, such as "all_reduce"; None before the first."""
    last = state.last
    return None if last is None else last.kind


def waiting() -> Waiting | None:
    """Return the collective that the main thread waits in now, from any thread."""
    now = perf_counter_ns()
    blocked, backward = state.blocked, state.backward
    if blocked is not None:
        launch, since_ns = blocked
        return None if launch is None else _describe(launch, now - since_ns, is_certain=True)
    if backward is not None:
        for number, launch in sorted(state.under_way.copy().items()):
            if number >= backward.first_launch:
                return _describe(launch, now - launch.start_ns, is_certain=False)
    return None


def _describe(launch: Launch, for_ns: int, *, is_certain: bool) -> Waiting:
    return Waiting(
        launch.kind,
        launch.book.name,
        launch.seq,
        launch.bytes,
        for_ns / 1e9,
        where.describe(launch.place),
        is_certain,
        launch.book.ranks,
        launch.peer,
        launch.book.title,
    )


def take() -> Traffic:
    """Return what passed since the last call. On the main thread."""
    sweep()
    ended = [state.ended.popleft() for _ in range(len(state.ended))]
    total_ns: int | None = None
    if state.level == "full":
        total_ns = intervals.union(ended, since=state.seen_until_ns)
        if ended:
            state.seen_until_ns = max(state.seen_until_ns, max(end for _, end in ended))
    traffic = Traffic(
        state.exposed_ns, total_ns, state.bytes, state.collectives, len(state.under_way)
    )
    state.exposed_ns = state.bytes = state.collectives = 0
    if state.backward is not None:
        state.backward.exposed_ns = 0
    return traffic


def backward_began() -> None:
    """The main thread enters an outermost backward."""
    state.backward = Backward(state)


def backward_ended() -> None:
    """The main thread leaves it: what was under way at its end is what DDP waited for."""
    backward, state.backward = state.backward, None
    if backward is None or backward.last_launch_ns == 0:
        return
    end_ns = perf_counter_ns()
    sweep()
    start_ns = backward.last_launch_ns
    under_way = [pair for pair in tuple(state.ended) if pair[1] > start_ns]
    waited_ns = intervals.union(under_way, since=start_ns, until=end_ns)
    counted_ns = state.exposed_ns - backward.exposed_ns
    # Waits that were seen one by one after the last launch are counted already.
    state.exposed_ns += max(0, waited_ns - counted_ns)


def expect_end(launch: Launch, work: Any, outputs: Any, is_main: bool) -> None:
    """Note the end of an asynchronous operator when it comes."""
    number = state.launched
    state.launched = number + 1
    state.under_way[number] = launch
    if len(state.under_way) > MAX_UNDER_WAY:
        state.under_way.pop(next(iter(state.under_way)), None)
    if is_main and state.backward is not None:
        state.backward.last_launch_ns = perf_counter_ns()
        state.backward.exposed_ns = state.exposed_ns

    try:
        future = work.get_future()
    except RuntimeError:
        # Its end is seen by whoever waits for it, or at the next `take`.
        launch.work = work
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        launch.outputs = tuple(t.data_ptr() for t in tensors if isinstance(t, torch.Tensor))
        _hold(launch)
        return
    launch.future = future

    def on_end(_: Any) -> None:  # on a thread of gloo's
        _note_end(number, perf_counter_ns())

    future.add_done_callback(on_end)


def _note_end(number: int, end_ns: int) -> None:
    launch = state.under_way.pop(number, None)
    if launch is not None:  # whoever comes first: the callback, or a sweep after a wait
        state.ended.append((launch.start_ns, end_ns))
        launch.work = launch.future = None  # they hold the tensors


def _hold(launch: Launch) -> None:
    """Keep few Works alive, for they keep their tensors: older ones go on without their end."""
    _held.append(launch)
    if len(_held) > MAX_HELD:
        _held.popleft().work = None


def sweep(waited_for: Any = None) -> None:
    """Note the end of those under way that are over.

    Who waits may go on before the callback has run; and gloo's reduce-scatter has no future,
    nor does it ever say that it is completed.
    """
    for number, launch in list(state.under_way.items()):
        if launch.future is not None:
            is_over = launch.future.done()
        elif launch.work is not None:
            is_over = (
                launch.work is waited_for
                or waited_for in launch.outputs
                or launch.work.is_completed()
            )
        else:
            continue
        if is_over:
            _note_end(number, perf_counter_ns())
