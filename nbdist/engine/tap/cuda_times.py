"""When collectives of tensors on a GPU began and ended, and how long the compute stream waited.

The host's clock does not see them: it queues and continues. So in sampled steps, events are
recorded in the streams, and looked at when the step is taken, or a later one: nothing here waits
for the GPU, and what has not passed yet is reported later.

- *Arrival*: an event on the stream that is current at the launch, before it. The GPU has come so
  far: for others it is this that counts, not when the host queued it.
- *End*: where no Work comes back (NCCL runs synchronous operators on the current stream, since
  torch 2.8) an event on that stream, behind it. Else the Work's future: NCCL's is completed as soon
  as the operation is queued, with an event at its end on NCCL's stream, and runs a callback at
  once, in the calling thread, within a stream of torch's pool that waits for that event
  (`ATen/core/ivalue_inl.h`, `invokeCallback`). There the callback records ours. For that step the
  allocator takes the outputs as used by that stream too, and a program's own stream of the same
  place in the pool (of 32) may wait for the collective with it. gloo's future has no streams: its
  callback runs on gloo's thread when the host's part is over, and the end is the host's.
- *Begin*: NCCL carries a group's collectives out one after the other: the later one of arrival and
  the end of the one before. The waiting for other ranks lies behind it, in NCCL's kernel.

Where the GPU's clock is not found, as when other processes compute on it, gloo's collectives are
timed by the host, as on CPU: waiting for the GPU counts as the collective's. NCCL's are not timed.

*Exposed* on CUDA is what the compute stream waited: the stream that is current on the main thread
as steps end. That no kernel runs beside a collective cannot be seen without a profiler. Seen are:

- `Work.wait` and `wait_tensor` on that stream: from the event before to the one behind, unless the
  host itself was blocked, which then counts as on CPU;
- synchronous operators that run on it: from arrival to end;
- DDP, which waits in C++ at the end of backward: from the arrival of the last launch in backward
  that no one has waited for to the end of backward on that stream, and no longer than that
  collective. What is computed behind the launch counts as waiting, as on CPU.

FSDP2 lets the compute stream wait for events of its own; that is not seen, its collectives are.
Not sampled are operators within a coalescing manager (torch marks their end before they are queued)
and within the capture of a graph.

Threads: launches and waits on any thread, ends on the launching one or on gloo's, `take` and
`backward_ended` on the main one.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter_ns
from typing import Any

import torch

from nbdist.engine.compat import torch_hooks
from nbdist.engine.tap import intervals
from nbdist.engine.tap.collective import LaunchedCollective
from nbdist.engine.tap.cuda_events import Anchor, CudaMark, EventSpan, Gpu

MAX_SPANS = 4096  # whose end has not passed
ANCHOR_EVERY_NS = 1_000_000_000
ANCHOR_TRIES_NS = 200_000
BLOCKED_NS = 100_000  # a wait that took the host so long was the host's


@dataclass(slots=True)
class Took:
    """The spans that have passed since the last `take`."""

    ended: list[LaunchedCollective] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Pending:
    """An asynchronous launch within backward that no one has waited for yet."""

    span: EventSpan
    work: Any
    pointers: list[int]


class CudaTimes:
    """The spans of this rank that are under way on its GPU."""

    def __init__(self, gpu: Gpu | None = None, now: Callable[[], int] = perf_counter_ns) -> None:
        self.step: int | None = None  # that is sampled; None: nothing is marked
        self.total_ns: int | None = None  # union of collectives in the last sampled step
        self.exposed_ns = 0  # the compute stream's waits in it
        self._gpu, self._now = gpu or Gpu(), now
        self._anchors: dict[torch.device, Anchor] = {}
        self._tried_ns: dict[torch.device, int] = {}
        self._compute: dict[torch.device, int] = {}
        self._device: torch.device | None = None  # of the last launch
        self.is_used = False  # by any collective of this process whose moments are known
        self.lacks_clock = False  # the last launch in a sampled step has no known time
        self._is_on_host = False  # the last launch's end is: gloo's
        self.forget()

    def forget(self) -> None:
        """Drop what is under way; earlier steps no longer count for later ones."""
        self.dropped = 0
        self.total_ns, self.exposed_ns = None, 0
        self._spans: deque[EventSpan] = deque()
        self._free: dict[object, int] = {}  # by book: the end of its last collective
        self._backward: list[Pending] | None = None
        self._now_over: int | None = None  # the step whose spans are passing
        self._collectives: list[tuple[int, int]] = []
        self._exposed: list[tuple[int, int]] = []

    # -- launches

    def begin(self, tensors: Iterable[Any]) -> CudaMark | None:
        """Mark the arrival at a launch with these tensors; None: it cannot be timed."""
        self.lacks_clock = False
        tensor = first_tensor(tensors) if self.step is not None else None
        if tensor is None or not self._gpu.can_mark():
            return None
        self._device = tensor.device
        self._compute.setdefault(tensor.device, self._gpu.stream(tensor.device))
        mark = self._mark(tensor.device)
        self.lacks_clock = mark is None
        self.is_used = self.is_used or mark is not None
        return mark

    def launched(
        self, launch: LaunchedCollective, begin: CudaMark, work: Any, outputs: Any, *, is_gloo: bool
    ) -> None:
        """Note what has been launched after `begin`, and have its end marked."""
        assert self.step is not None
        assert self._device is not None
        span, device = EventSpan(self.step, begin, launch), self._device
        self._is_on_host = is_gloo
        if work is None:
            span.end = self._mark(device)
            span.is_exposed = begin.stream == self._compute[device]
        else:
            future = torch_hooks.future_of(work)
            if future is None:
                self.dropped += 1
                return
            is_on_host = is_gloo or not future.done()

            def end(_: Any) -> None:
                if is_on_host:
                    span.end_ns = self._now()
                else:
                    span.end = self._mark(device)

            if self._backward is not None:
                self._backward.append(Pending(span, work, pointers(outputs)))
            self._append(span)
            future.add_done_callback(end)
            return
        self._append(span)

    def _append(self, span: EventSpan) -> None:
        if len(self._spans) >= MAX_SPANS:
            lost = self._spans.popleft()
            self.dropped += lost.launch is not None
        self._spans.append(span)

    def _mark(self, device: torch.device) -> CudaMark | None:
        anchor = self._anchor(device)
        if anchor is None:
            return None
        recorded_ns = self._now()
        return CudaMark(self._gpu.mark(device), recorded_ns, anchor, self._gpu.stream(device))

    def _anchor(self, device: torch.device) -> Anchor | None:
        """Return the device's anchor, a new one where the last is old; None: it has none yet."""
        now_ns = self._now()
        if now_ns - self._tried_ns.get(device, -ANCHOR_EVERY_NS) >= ANCHOR_EVERY_NS:
            self._tried_ns[device] = now_ns
            found = [self._try_anchor(device) for _ in range(2)]  # the first makes the stream
            good = [anchor for anchor in found if anchor is not None]
            if good:
                self._anchors[device] = min(good, key=lambda anchor: anchor.error_ns)
        return self._anchors.get(device)

    def _try_anchor(self, device: torch.device) -> Anchor | None:
        since_ns = self._now()
        event = self._gpu.mark_alone(device)
        while not event.query():
            if self._now() - since_ns > ANCHOR_TRIES_NS:  # streams share a queue of the hardware
                return None
        until_ns = self._now()
        return Anchor(event, (since_ns + until_ns) // 2, (until_ns - since_ns + 1) // 2)

    # -- waits of the compute stream

    def wait_began(self, target: Any) -> CudaMark | None:
        """A stream is about to wait for a Work or a tensor; None: it is not sampled."""
        device = self._device
        if self.step is None or device is None or self._is_on_host:
            return None
        if isinstance(target, torch.Tensor) and target.device.type != device.type:
            return None
        if self._gpu.stream(device) != self._compute.get(device) or not self._gpu.can_mark():
            return None
        return self._mark(device)

    def wait_ended(self, target: Any, begin: CudaMark, blocked_ns: int) -> None:
        """The stream now waits; the host was blocked for `blocked_ns`."""
        if self.step is None or self._device is None:
            return
        if self._backward:
            self._backward = [p for p in self._backward if not _is_of(target, p)]
        if blocked_ns <= BLOCKED_NS:
            self._append(EventSpan(self.step, begin, end=self._mark(self._device), is_exposed=True))

    def backward_began(self) -> None:
        """The main thread enters an outermost backward."""
        self._backward = []

    def backward_ended(self) -> None:
        """It leaves it: the compute stream has been made to wait for what DDP launched."""
        pending, self._backward = self._backward, None
        if not pending or self.step is None or self._device is None:
            return
        last = pending[-1].span
        if self._gpu.stream(self._device) != last.begin.stream or not self._gpu.can_mark():
            return
        end = self._mark(self._device)
        self._append(EventSpan(self.step, last.begin, end=end, is_exposed=True, cut_by=last.launch))

    # -- what has passed

    def is_open(self, step: int) -> bool:
        """Return whether a launch of this step, or of an earlier one, is under way."""
        return bool(self._spans) and self._spans[0].step <= step

    def take(self) -> Took:
        """Return what has passed since the last call. Asks one event more than have passed."""
        took = Took()
        while self._spans and self._spans[0].is_over():
            span = self._spans.popleft()
            if span.step != self._now_over:
                self._close()
                self._now_over = span.step
            self._pass(span, took)
        if not self._spans and self._now_over is not None and self._now_over != self.step:
            self._close()
        return took

    def begin_step(self, step: int | None) -> None:
        """A step begins, None if it is not sampled. On the main thread, in its stream."""
        self.step = step
        if self._device is not None:
            self._compute[self._device] = self._gpu.stream(self._device)

    def _pass(self, span: EventSpan, took: Took) -> None:
        seen_ns = self._now()
        begin_ns = span.begin.anchor.moment_of(span.begin, seen_ns)
        end_ns = span.end_ns or begin_ns
        if span.end is not None:
            end_ns = span.end.anchor.moment_of(span.end, seen_ns)
        launch = span.launch
        if launch is not None:
            end_ns = max(begin_ns, end_ns)
            free_ns = 0 if launch.is_message else self._free.get(launch.book, 0)
            launch.start_ns, launch.end_ns = begin_ns, end_ns
            launch.begin_ns = min(max(begin_ns, free_ns), end_ns)
            if not launch.is_message and span.end is not None:
                self._free[launch.book] = end_ns
            took.ended.append(launch)
            self._collectives.append((launch.begin_ns, end_ns))
        if span.cut_by is not None and span.cut_by.end_ns:
            end_ns = min(end_ns, span.cut_by.end_ns)
        if span.is_exposed and end_ns > begin_ns:
            took.waits.append((begin_ns, end_ns))
            self._exposed.append((begin_ns, end_ns))

    def _close(self) -> None:
        """A sampled step has passed as a whole."""
        if self._now_over is not None:
            self.total_ns = intervals.union(self._collectives)
            self.exposed_ns = intervals.union(self._exposed)
        self._now_over, self._collectives, self._exposed = None, [], []


def around_wait(times: CudaTimes) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper for a function that makes a stream wait for a collective."""

    def wrapper(native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def wait(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not args:
                return native(*args, **kwargs)
            begin = times.wait_began(args[0])
            if begin is None:
                return native(*args, **kwargs)
            since_ns = perf_counter_ns()
            result = native(*args, **kwargs)
            times.wait_ended(args[0], begin, perf_counter_ns() - since_ns)
            return result

        return wait

    return wrapper


def first_tensor(values: Any) -> torch.Tensor | None:
    """Return the first tensor in lists of lists, None where there is none."""
    if isinstance(values, torch.Tensor):
        return values
    if not isinstance(values, list | tuple):
        return None
    return next((found for part in values if (found := first_tensor(part)) is not None), None)


def pointers(outputs: Any) -> list[int]:
    """Return the addresses of the tensors in lists of lists."""
    if isinstance(outputs, torch.Tensor):
        return [outputs.data_ptr()]
    if not isinstance(outputs, list | tuple):
        return []
    return [pointer for part in outputs for pointer in pointers(part)]


def _is_of(target: Any, pending: Pending) -> bool:
    if isinstance(target, torch.Tensor):
        return target.data_ptr() in pending.pointers
    return target is pending.work
