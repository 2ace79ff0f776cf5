"""Times of collectives on a GPU, with events and futures that stand in for torch's.

The stand-in GPU has a clock of its own, which runs apart from the host's; an event's moment is
when its stream comes to it. Nothing here has run on a real one: `tests/gpu/test_times.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from nbdist.engine.tap import cuda_times, in_flight
from nbdist.engine.tap.collective import LaunchedCollective
from nbdist.engine.tap.counters import GroupCounters
from nbdist.engine.tap.cuda_events import CudaMark, Gpu
from nbdist.engine.tap.cuda_times import ANCHOR_EVERY_NS, BLOCKED_NS, MAX_SPANS, CudaTimes
from nbdist.shared.packed import CALL, TICK_NS

MS = 1_000_000
AHEAD_NS = 777_000_000_000  # of the GPU's clock before the host's
COMPUTE, NCCL, SIDE = 0, 1, 2


@dataclass
class _Event:
    """Passes at `at_ns` of the host's clock; None: never."""

    world: _World
    at_ns: int | None

    def query(self) -> bool:
        self.world.asked += 1
        return self.at_ns is not None and self.at_ns <= self.world.now_ns

    def passed_ns(self) -> float:
        assert self.query(), "torch raises when an event has not passed"
        assert self.at_ns is not None
        return AHEAD_NS + self.at_ns * self.world.rate

    def elapsed_time(self, end_event: Any) -> float:
        here, there = self.passed_ns(), end_event.passed_ns()
        assert there >= here, "only later events are asked for"
        return float((there - here) / MS)


@dataclass
class _World:
    """A host and a GPU: what is queued on each stream passes when the stream is there."""

    now_ns: int = 5_000 * MS
    rate: float = 1.0
    stream_now: int = COMPUTE
    reached: dict[int, int | None] = field(default_factory=dict)  # by stream; None: stuck
    asked: int = 0
    anchors: int = 0
    is_anchor_stuck: bool = False
    may_mark: bool = True

    def now(self) -> int:
        self.now_ns += 1_000  # looking at the clock takes a microsecond
        return self.now_ns

    def queue(self, stream: int, ms: float | None) -> None:
        """Let a stream be busy for so long behind what is queued on it."""
        since_ns = self.reached.get(stream, 0)
        if since_ns is not None:
            late_ns = max(self.now_ns, since_ns)
            self.reached[stream] = None if ms is None else late_ns + round(ms * MS)

    def mark(self, device: torch.device) -> _Event:
        at_ns = self.reached.get(self.stream_now, 0)
        return _Event(self, None if at_ns is None else max(at_ns, self.now_ns))

    def mark_alone(self, device: torch.device) -> _Event:
        self.anchors += 1
        return _Event(self, None if self.is_anchor_stuck else self.now_ns + 5_000)

    def stream(self, device: torch.device) -> int:
        return self.stream_now

    def can_mark(self) -> bool:
        return self.may_mark


class _Future:
    """NCCL's, completed at once: a callback runs in a stream that waits for the collective."""

    def __init__(self, world: _World, stream: int) -> None:
        self.world, self.stream = world, stream

    def done(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        outer, self.world.stream_now = self.world.stream_now, self.stream
        callback(self)
        self.world.stream_now = outer


class _HostFuture:
    """gloo's: completed later, on its thread."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def done(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)


@dataclass
class _Work:
    future: Any

    def get_future(self) -> Any:
        if self.future is None:
            raise RuntimeError("this backend gives none")
        return self.future


class _Book:
    name, title, ranks, workers = "0", "the default group", (0, 1), 0


BOOK = cast("GroupCounters", _Book())


class _Rank:
    """What the tap does around launches, on a GPU that stands in."""

    def __init__(self, **world: Any) -> None:
        self.world = _World(**world)
        self.times = CudaTimes(cast("Gpu", self.world), self.world.now)
        self.times.begin_step(1)
        self.tensor = torch.empty(4, device="meta")
        self.seq = 0

    def begin(self) -> CudaMark | None:
        return self.times.begin([[self.tensor]])

    def nccl(self, ms: float | None, book: Any = BOOK, stream: int = NCCL) -> LaunchedCollective:
        """Launch a collective on NCCL's stream that lasts so long behind what is queued there."""
        begin = self.begin()
        assert begin is not None
        launch, here = self._launch(book), self.world.reached.get(self.world.stream_now, 0)
        if here is None:
            self.world.queue(stream, None)
        else:
            there = self.world.reached.get(stream, 0)
            self.world.reached[stream] = None if there is None else max(there, here)
        self.world.queue(stream, ms)
        self.work = _Work(_Future(self.world, stream))
        self.times.launched(launch, begin, self.work, [self.tensor], is_gloo=False)
        return launch

    def synchronous(self, ms: float) -> LaunchedCollective:
        """Launch one that NCCL runs on the current stream, and returns no Work of."""
        begin = self.begin()
        assert begin is not None
        launch = self._launch(BOOK)
        self.world.queue(self.world.stream_now, ms)
        self.times.launched(launch, begin, None, [self.tensor], is_gloo=False)
        return launch

    def wait(self, target: Any, blocked_ns: int = 2_000, stream: int = NCCL) -> None:
        """Let the current stream wait for NCCL's."""
        begin = self.times.wait_began(target)
        there = self.world.reached.get(stream, 0)
        here = self.world.reached.get(self.world.stream_now, 0)
        stuck = there is None or here is None
        self.world.reached[self.world.stream_now] = None if stuck else max(here or 0, there or 0)
        if begin is not None:
            self.times.wait_ended(target, begin, blocked_ns)

    def _launch(self, book: Any) -> LaunchedCollective:
        self.seq += 1
        return LaunchedCollective("all_reduce", book, self.seq, 16, self.world.now(), None, None)

    def later(self, ms: float) -> cuda_times.Took:
        self.world.now_ns += round(ms * MS)
        return self.times.take()


def _ms(since_ns: int, moment_ns: int) -> Any:
    return pytest.approx((moment_ns - since_ns) / MS, abs=0.1)


def test_a_collective_begins_when_the_gpu_comes_to_it_and_ends_when_it_has_passed() -> None:
    rank = _Rank()
    since_ns = rank.world.now_ns
    rank.world.queue(COMPUTE, 30)  # the host is far ahead of the GPU
    launch = rank.nccl(12)
    assert rank.later(40).ended == []
    assert rank.times.is_open(1)
    assert rank.later(5).ended == [launch]
    assert not rank.times.is_open(1)
    assert _ms(since_ns, launch.start_ns) == 30
    assert _ms(since_ns, launch.begin_ns) == 30
    assert _ms(since_ns, launch.end_ns) == 42


def test_collectives_of_a_group_follow_each_other_and_those_of_another_do_not() -> None:
    rank = _Rank()
    other = cast("GroupCounters", _Book())
    since_ns = rank.world.now_ns
    first, second = rank.nccl(10), rank.nccl(10)
    beside = rank.nccl(5, book=other, stream=SIDE)
    took = rank.later(50)
    assert took.ended == [first, second, beside]
    assert [_ms(since_ns, launch.start_ns) for launch in took.ended] == [0, 0, 0]
    assert [_ms(since_ns, launch.begin_ns) for launch in took.ended] == [0, 10, 0]
    assert [_ms(since_ns, launch.end_ns) for launch in took.ended] == [10, 20, 5]


def test_a_clock_that_drifts_is_followed_by_new_anchors() -> None:
    rank = _Rank(rate=1 + 40e-6)
    errors = []
    for _ in range(100):
        rank.world.now_ns += 100 * MS
        rank.world.queue(COMPUTE, 1)
        true_ns = rank.world.reached[COMPUTE]
        assert true_ns is not None
        launch = rank.nccl(1)
        rank.later(10)
        errors.append(abs(launch.start_ns - true_ns))
    assert max(errors) < 60_000  # 40 us a second of drift and an anchor's error
    assert rank.world.anchors == 2 * 10  # two tries in each tenth step of 110 ms


def test_without_new_anchors_the_drift_would_have_shown() -> None:
    rank = _Rank(rate=1 + 40e-6)
    rank.nccl(1)
    rank.later(5)
    rank.world.is_anchor_stuck = True
    rank.world.now_ns += 60_000 * MS
    rank.world.queue(COMPUTE, 10)
    true_ns = rank.world.reached[COMPUTE]
    assert true_ns is not None
    launch = rank.nccl(20)
    rank.later(100)
    assert launch.start_ns - true_ns == pytest.approx(60 * 40_000, rel=0.1)


def test_an_anchor_that_does_not_pass_is_given_up_and_nothing_is_told_without_one() -> None:
    rank = _Rank(is_anchor_stuck=True)
    since_ns = rank.world.now_ns
    assert rank.begin() is None
    assert rank.world.now_ns - since_ns < 3 * cuda_times.ANCHOR_TRIES_NS
    asked = rank.world.asked
    assert rank.begin() is None
    assert rank.world.asked == asked  # not tried again at once
    rank.world.is_anchor_stuck = False
    rank.world.now_ns += ANCHOR_EVERY_NS
    assert rank.begin() is not None


def test_an_anchor_states_half_of_the_time_around_it() -> None:
    rank = _Rank()
    begin = rank.begin()
    assert begin is not None
    assert 0 < begin.anchor.error_ns <= 5_000


def test_no_moment_lies_behind_its_being_seen_or_before_its_being_recorded() -> None:
    for rate in (0.9, 1.1):
        rank = _Rank(rate=rate)
        rank.nccl(1)
        rank.later(5)
        rank.world.is_anchor_stuck = True
        rank.world.now_ns += 5_000 * MS
        recorded_ns = rank.world.now_ns
        launch = rank.nccl(1)
        rank.later(2)
        assert recorded_ns <= launch.start_ns <= launch.end_ns <= rank.world.now_ns


def test_the_compute_stream_waits_from_where_it_stands_to_the_end_of_the_collective() -> None:
    rank = _Rank()
    since_ns = rank.world.now_ns
    rank.nccl(30)
    rank.world.queue(COMPUTE, 20)  # hides 20 ms
    rank.wait(rank.work)
    ((begin_ns, end_ns),) = rank.later(50).waits
    assert (_ms(since_ns, begin_ns), _ms(since_ns, end_ns)) == (20, 30)
    rank.times.begin_step(2)
    rank.times.take()
    assert rank.times.exposed_ns == pytest.approx(10 * MS, abs=0.1 * MS)
    assert rank.times.total_ns == pytest.approx(30 * MS, abs=0.1 * MS)


def test_a_collective_that_computing_hides_leaves_no_wait() -> None:
    rank = _Rank()
    rank.nccl(10)
    rank.world.queue(COMPUTE, 20)
    rank.wait(rank.work)
    assert sum(end - begin for begin, end in rank.later(50).waits) < 0.1 * MS


def test_a_wait_that_blocks_the_host_is_the_hosts() -> None:
    rank = _Rank()
    rank.nccl(10)
    rank.wait(rank.work, blocked_ns=BLOCKED_NS + 1)
    assert rank.later(50).waits == []


def test_what_another_stream_waits_is_not_exposed() -> None:
    rank = _Rank()
    rank.nccl(10)
    rank.world.stream_now = SIDE
    rank.wait(rank.work)
    rank.synchronous(5)
    assert rank.later(50).waits == []


def test_a_synchronous_collective_on_the_compute_stream_is_exposed_as_a_whole() -> None:
    rank = _Rank()
    since_ns = rank.world.now_ns
    rank.world.queue(COMPUTE, 7)
    launch = rank.synchronous(5)
    took = rank.later(50)
    assert took.ended == [launch]
    ((begin_ns, end_ns),) = took.waits
    assert (_ms(since_ns, begin_ns), _ms(since_ns, end_ns)) == (7, 12)


def test_ddp_waits_from_its_last_launch_in_backward_to_that_collectives_end() -> None:
    rank = _Rank()
    rank.nccl(1)
    rank.later(10)
    since_ns = rank.world.now_ns
    rank.times.backward_began()
    rank.world.queue(COMPUTE, 10)
    rank.nccl(4)
    rank.world.queue(COMPUTE, 10)
    rank.nccl(6)  # launched at 20 ms
    rank.world.reached[COMPUTE] = rank.world.reached[NCCL]  # C++ waits, and copies out for 3 ms
    rank.world.queue(COMPUTE, 3)
    rank.times.backward_ended()
    ((begin_ns, end_ns),) = rank.later(100).waits
    assert (_ms(since_ns, begin_ns), _ms(since_ns, end_ns)) == (20, 26)


def test_what_was_waited_for_within_backward_is_not_counted_at_its_end_as_well() -> None:
    rank = _Rank()
    rank.nccl(1)
    rank.later(10)
    rank.times.backward_began()
    rank.nccl(6)
    rank.wait(rank.work)
    rank.world.queue(COMPUTE, 50)
    rank.times.backward_ended()
    assert [(end - begin) / MS for begin, end in rank.later(100).waits] == [
        pytest.approx(6, abs=0.1)
    ]


def test_what_has_not_passed_stays_for_a_later_step_and_costs_one_question() -> None:
    rank = _Rank()
    rank.nccl(1)
    rank.later(10)
    rank.nccl(20)
    for _ in range(500):
        rank.nccl(1)
    asked = rank.world.asked
    assert rank.times.take().ended == []
    assert rank.world.asked == asked + 1
    rank.times.begin_step(None)
    assert len(rank.later(1000).ended) == 501


def test_of_too_many_under_way_the_oldest_are_dropped_and_counted() -> None:
    rank = _Rank()
    rank.nccl(None)
    for _ in range(MAX_SPANS + 9):
        rank.nccl(1, stream=SIDE)
    assert rank.times.dropped == 10
    assert len(rank.later(10_000).ended) == MAX_SPANS


def test_gloos_end_is_the_hosts() -> None:
    rank = _Rank()
    begin = rank.begin()
    assert begin is not None
    future, launch = _HostFuture(), rank._launch(BOOK)
    rank.times.launched(launch, begin, _Work(future), [rank.tensor], is_gloo=True)
    assert rank.later(10).ended == []
    future.callbacks[0](future)
    told_ns = rank.world.now_ns
    assert rank.later(10).ended == [launch]
    assert launch.end_ns == told_ns
    assert rank.times.wait_began(_Work(future)) is None  # there the host is blocked


def test_a_work_without_a_future_is_left_out_and_counted() -> None:
    rank = _Rank()
    begin = rank.begin()
    assert begin is not None
    rank.times.launched(rank._launch(BOOK), begin, _Work(None), [rank.tensor], is_gloo=False)
    assert rank.times.dropped == 1
    assert not rank.times.is_open(9)


def test_nothing_is_marked_in_steps_that_are_not_told_nor_in_a_graphs_capture() -> None:
    rank = _Rank()
    rank.nccl(1)
    rank.world.may_mark = False
    assert rank.begin() is None
    assert rank.times.wait_began(rank.work) is None
    rank.world.may_mark = True
    rank.times.begin_step(None)
    assert rank.begin() is None
    assert rank.times.wait_began(rank.work) is None


def test_a_step_is_told_when_its_gpu_is_through_and_with_its_own_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = _Rank()
    state = in_flight.TapState()
    state.level, state.cuda = "full", rank.times
    monkeypatch.setattr(in_flight, "state", state)
    in_flight.take()

    def step() -> None:
        state.collectives += 1
        launch = rank.nccl(30)
        assert in_flight.sample(launch)
        rank.world.now_ns += 10 * MS

    step()
    first = in_flight.take(1)
    assert (first.calls, first.collectives, first.total_ns) == (None, 1, None)
    step()
    second = in_flight.take(2)
    assert second.calls is None
    rank.world.now_ns += 25 * MS  # the first has passed
    third = in_flight.take(3)
    assert third.calls is not None
    assert third.calls_step == 1
    assert _durations_ms(third.calls) == [pytest.approx(30, abs=0.1)]
    assert in_flight.late() is None
    rank.world.now_ns += 100 * MS
    late = in_flight.late()
    assert late is not None
    assert late[0] == 2
    assert _durations_ms(late[1]) == [pytest.approx(30, abs=0.1)]
    assert [told[0] for told in (in_flight.late(),) if told is not None] == [3]
    assert in_flight.late() is None


def _durations_ms(calls: Any) -> list[float]:
    flat = calls.calls.tolist()
    rows = [flat[i : i + len(CALL)] for i in range(0, len(flat), len(CALL))]
    return [(end - begin) * TICK_NS / MS for *_, begin, end, _ in rows]


def test_a_cell_that_begins_forgets_what_is_under_way() -> None:
    rank = _Rank()
    rank.nccl(None)
    rank.times.forget()
    assert not rank.times.is_open(100)
    assert rank.times.total_ns is None
