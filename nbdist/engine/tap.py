"""See every collective of this rank: count it, time it, tell which one the main thread waits in.

The tap puts Python functions in the place of torch's kernels of the `c10d` operators
(`tap_ops.py`), below DDP's reducer, FSDP, DTensor and the Python API alike. Each asks the process
group for its backend anew, for a fault may have put another one there.

Levels: "off" takes everything out, native speed. "counts": number, bytes and kind, and the time
the main thread waits. "full": also when each collective ran, and the line of the cell that
launched it. All ranks must be at the same level.

**What the times mean.** *Total* is the union of the intervals from launch to end of all
collectives, on CPU: queueing for one of gloo's threads is in it, overlap counts once. *Exposed*
is the time during which the main thread waited for a collective and could do nothing else:

- synchronous operators (`dist.all_reduce(x)`; FSDP2 on CPU, where gathers and reduce-scatters
  are synchronous): from launch to end, measured in the operator itself;
- asynchronous ones: the time inside `Work.wait()`, or `wait_tensor` for functional collectives
  and DTensor;
- DDP, whose reducer waits in C++ at the end of backward: the part of the time from the last
  launch within backward to backward's end in which a collective launched in this backward was
  under way, waits counted above left out. What the main thread computes after the last launch
  counts as waiting there; for DDP that is the copying out of buckets.

On CUDA the host's clock does not see when a collective ends: there they are counted, and only
the time the host is blocked is exposed.

Threads: operators run on whatever thread launches them, ends on gloo's. `waiting`, `counts` and
`last_kind` may be called on any thread; `install` and `set_level` on the main thread while no
collective is under way.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from time import perf_counter_ns
from types import FrameType
from typing import Any, Literal

import torch

from nbdist.engine import intervals, torch_hooks
from nbdist.engine.tap_ops import OPS, Op, size_bytes

Level = Literal["off", "counts", "full"]
LEVELS: tuple[Level, ...] = ("off", "counts", "full")

MAX_INTERVALS = 65_536  # ends that nobody has collected; the oldest fall out
MAX_UNDER_WAY = 4096  # launches whose end has not been seen
MAX_HELD = 64  # Works kept to ask for their end
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Waiting:
    """The collective that the main thread is in.

    `seq` numbers the group's collectives from 1, since it was formed. `line` is where in a cell
    it was launched, "file:line", at level "full". `is_certain` is False inside backward, where
    DDP waits out of sight: the collective is under way, the main thread may also be computing.
    """

    kind: str
    group: str
    seq: int
    bytes: int
    seconds: float
    line: str | None = None
    is_certain: bool = True

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__slots__}


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


class _Launch:
    """A collective this rank has launched."""

    __slots__ = (
        "bytes",
        "future",
        "group",
        "kind",
        "line",
        "outputs",
        "seq",
        "start_ns",
        "work",
    )

    def __init__(
        self, kind: str, group: str, seq: int, size: int, start_ns: int, line: str | None
    ) -> None:
        self.kind = kind
        self.group = group
        self.seq = seq
        self.bytes = size
        self.start_ns = start_ns
        self.line = line
        # Only where torch gives no future: gloo's reduce-scatter, send and recv.
        self.work: Any = None
        self.outputs: tuple[int, ...] = ()  # data pointers
        self.future: Any = None


class _State:
    """All that the tap keeps; one a process."""

    def __init__(self) -> None:
        self.level: Level = "off"
        self.undo: list[torch_hooks.Undo] = []
        self.main = threading.main_thread().ident
        self.counts: dict[str, int] = {}  # by group
        self.bytes = 0  # since the last take, as the three below
        self.collectives = 0
        self.exposed_ns = 0
        self.ended: deque[tuple[int, int]] = deque(maxlen=MAX_INTERVALS)
        self.under_way: dict[int, _Launch] = {}  # asynchronous ones; by number of launch
        self.launched = 0
        self.last: _Launch | None = None
        self.blocked: tuple[_Launch | None, int] | None = None  # main thread, since when (ns)
        self.seen_until_ns = 0  # intervals up to here have been taken
        self.backward: _Backward | None = None


class _Backward:
    """A backward that the main thread is in."""

    __slots__ = ("exposed_ns", "first_launch", "last_launch_ns")

    def __init__(self, state: _State) -> None:
        self.first_launch = state.launched
        self.last_launch_ns = 0
        self.exposed_ns = state.exposed_ns


_state = _State()


def install(level: str = "full") -> None:
    """Begin to see collectives; the same as `set_level`.

    Raises:
        ValueError: No such level.
    """
    set_level(level)


def level() -> str:
    """Return the level in force."""
    return _state.level


def set_level(level: str) -> None:
    """Change what is seen of collectives; all ranks must do the same.

    Raises:
        ValueError: No such level.
    """
    if level not in LEVELS:
        raise ValueError(f"the tap's level is one of {', '.join(LEVELS)}, not {level!r}")
    if level == _state.level:
        return
    for undo in _state.undo:
        undo()
    _state.undo.clear()
    _state.level = level
    _state.under_way.clear()
    if level == "off":
        return
    known = torch_hooks.collective_ops()
    for device in DEVICES:
        kernels = {
            name: _kernel(op, device, is_full=level == "full")
            for name, op in OPS.items()
            if op.launch is not None and name in known
        }
        _state.undo.append(torch_hooks.place_kernels(kernels, device))
    _state.undo.append(torch_hooks.wrap_work_wait(_timed_wait))
    _state.undo.append(torch_hooks.wrap_wait_tensor(_timed_wait))


def counts() -> dict[str, int]:
    """Return, for each group's name, the collectives launched since it was formed."""
    return dict(_state.counts)


def reset_counts() -> None:
    """Begin to count at zero: the groups have been formed anew."""
    _state.counts = {}
    _state.under_way.clear()


def last_kind() -> str | None:
    """Return the kind of the newest collective, such as "all_reduce"; None before the first."""
    last = _state.last
    return None if last is None else last.kind


def waiting() -> Waiting | None:
    """Return the collective that the main thread waits in now, from any thread."""
    now = perf_counter_ns()
    blocked, backward = _state.blocked, _state.backward
    if blocked is not None:
        launch, since_ns = blocked
        return None if launch is None else _describe(launch, now - since_ns, is_certain=True)
    if backward is not None:
        for number, launch in sorted(_state.under_way.copy().items()):
            if number >= backward.first_launch:
                return _describe(launch, now - launch.start_ns, is_certain=False)
    return None


def _describe(launch: _Launch, for_ns: int, *, is_certain: bool) -> Waiting:
    return Waiting(
        launch.kind,
        launch.group,
        launch.seq,
        launch.bytes,
        for_ns / 1e9,
        launch.line,
        is_certain,
    )


def take() -> Traffic:
    """Return what passed since the last call. On the main thread."""
    state = _state
    _sweep(state)
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
    _state.backward = _Backward(_state)


def backward_ended() -> None:
    """The main thread leaves it: what was under way at its end is what DDP waited for."""
    backward, _state.backward = _state.backward, None
    if backward is None or backward.last_launch_ns == 0:
        return
    end_ns = perf_counter_ns()
    _sweep(_state)
    start_ns = backward.last_launch_ns
    under_way = [pair for pair in tuple(_state.ended) if pair[1] > start_ns]
    waited_ns = intervals.union(under_way, since=start_ns, until=end_ns)
    counted_ns = _state.exposed_ns - backward.exposed_ns
    # Waits that were seen one by one after the last launch are in both figures.
    _state.exposed_ns += max(0, waited_ns - min(counted_ns, waited_ns))


def _kernel(op: Op, device_type: str, *, is_full: bool) -> Callable[..., Any]:
    """Return the function that carries out one operator on one kind of device."""
    launch_op, kind, sends = op.launch, op.kind, op.sends
    assert launch_op is not None
    group_at, async_at, payload_at = op.group_at, op.async_at, op.payload_at
    returns_outputs, returns_nothing = op.returns == "outputs and work", op.returns == "nothing"
    device = torch.device(device_type)
    ends_are_seen = device_type == "cpu"
    state, unbox = _state, torch_hooks.unbox_group
    get_ident, now = threading.get_ident, perf_counter_ns

    def kernel(*args: Any) -> Any:
        group = unbox(args[group_at])
        name = group.group_name
        seq = state.counts.get(name, 0) + 1
        size = 0 if payload_at is None else size_bytes(args[payload_at])
        line = _cell_line(sys._getframe(1)) if is_full else None
        start_ns = now()
        launch = _Launch(kind, name, seq, size, start_ns, line)
        state.last = launch
        is_main = get_ident() == state.main
        if is_main:
            state.blocked = (launch, start_ns)
        try:
            work = launch_op(group._get_backend(device), *args)
            state.counts[name] = seq
            state.collectives += 1
            if sends:
                state.bytes += size
            is_sync = returns_nothing or (
                async_at is not None and len(args) > async_at and not args[async_at]
            )
            if ends_are_seen:
                if is_sync:
                    _wait_here(work, start_ns, is_main, is_full)
                elif is_full:
                    _expect_end(launch, work, args[0], is_main)
        finally:
            if is_main:
                state.blocked = None
        if returns_nothing:
            return None
        if work is None:
            work = torch_hooks.finished_work()
        return (args[0], work.boxed()) if returns_outputs else work.boxed()

    return kernel


def _wait_here(work: Any, start_ns: int, is_main: bool, is_full: bool) -> None:
    """Wait for a synchronous operator within it: its end is then known without a callback."""
    if work is not None:
        # The caller waits for the same Work next, and gets the same error from there, as without
        # the tap.
        with suppress(RuntimeError):
            torch_hooks.native_work_wait(work)
    end_ns = perf_counter_ns()
    if is_main:
        _state.exposed_ns += end_ns - start_ns
    if is_full:
        _state.ended.append((start_ns, end_ns))


def _expect_end(launch: _Launch, work: Any, outputs: Any, is_main: bool) -> None:
    """Note the end of an asynchronous operator when it comes."""
    state = _state
    number = state.launched
    state.launched = number + 1
    state.under_way[number] = launch
    if len(state.under_way) > MAX_UNDER_WAY:
        state.under_way.pop(next(iter(state.under_way)), None)
    if is_main and state.backward is not None:
        state.backward.last_launch_ns = perf_counter_ns()

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
        _note_end(state, number, perf_counter_ns())

    future.add_done_callback(on_end)


def _note_end(state: _State, number: int, end_ns: int) -> None:
    launch = state.under_way.pop(number, None)
    if launch is not None:  # whoever comes first: the callback, or a sweep after a wait
        state.ended.append((launch.start_ns, end_ns))
        launch.work = launch.future = None  # they hold the tensors


def _hold(launch: _Launch) -> None:
    """Keep few Works alive, for they keep their tensors: older ones go on without their end."""
    _held.append(launch)
    if len(_held) > MAX_HELD:
        _held.popleft().work = None


_held: deque[_Launch] = deque()


def _sweep(state: _State, waited_for: Any = None) -> None:
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
            _note_end(state, number, perf_counter_ns())


def _timed_wait(native: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in which a thread waits for a collective it launched before."""
    state, get_ident, now = _state, threading.get_ident, perf_counter_ns

    @wraps(native)
    def wait(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or get_ident() != state.main:
            return native(*args, **kwargs)
        start_ns = now()
        outer = state.blocked
        oldest = next(iter(state.under_way.copy().values()), state.last)
        state.blocked = (oldest, start_ns)
        try:
            return native(*args, **kwargs)
        finally:
            state.blocked = outer
            if outer is None:
                state.exposed_ns += now() - start_ns
            if state.under_way:
                target = args[0] if args else None
                # Functional collectives wait for a tensor, not for a Work.
                _sweep(state, target.data_ptr() if isinstance(target, torch.Tensor) else target)

    return wait


_is_cell_file: dict[str, bool] = {}


def _cell_line(frame: FrameType | None) -> str | None:
    """Return "file:line" of the innermost frame that is code of a cell."""
    while frame is not None:
        name = frame.f_code.co_filename
        is_cell = _is_cell_file.get(name)
        if is_cell is None:
            # As IPython and ipykernel name what they compile.
            is_cell = "ipykernel_" in name or name.startswith("<ipython-input")
            _is_cell_file[name] = is_cell
        if is_cell:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
